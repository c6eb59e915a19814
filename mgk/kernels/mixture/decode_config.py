"""Constexprs of the decode kernels."""

import functools
from typing import Any

DECODE_CONSTEXPRS = ("M", "D", "E", "BD", "BE", "SHIFTED", "HARD", "SCALE", "TAU", "CAUSAL")


@functools.cache
def decode_constexprs(
    constexprs: tuple[tuple[str, Any], ...], rows: int, block_n: int, keys_at_once: int, stages: int, bias: int,
    counted: bool, value_heads: tuple[int, int, int],
) -> dict[str, Any]:  # fmt: skip
    """Return the constexprs of `decode_row` or, with keys_at_once 0, of `decode_split`."""
    shared = dict(constexprs)
    values = dict(zip(("VALUE_GROUP", "VALUE_HEADS", "VALUE_STEP"), value_heads, strict=True))
    common = {name: shared[name] for name in DECODE_CONSTEXPRS} | {"BN": block_n}
    if keys_at_once:
        row = {"GROUP": rows, "BI": keys_at_once, "BIAS": bias, "STAGES": stages, "COUNTED": counted}
        return common | row | values
    split = {"BM": rows, "MASK": shared["MASK"], "BIAS": bias > 0, "PRECISION": shared["PRECISION"]}
    return common | split | {"COUNTED": counted} | values


def decode_value_heads(group: int, value_group: int) -> tuple[int, int, int]:
    """Return the constexprs VALUE_GROUP, VALUE_HEADS and VALUE_STEP of the decode kernels.

    A program reads as many value heads as its group of query heads has, or one for each query head if they begin at
    different heads of the groups.
    """
    if value_group == 0 or value_group % group == 0:
        return value_group, 1, group
    heads = group // value_group if group % value_group == 0 else group
    return value_group, heads, group // heads
