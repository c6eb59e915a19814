"""The argument list of the mixture kernels, and the operator schemas made from it."""

from collections.abc import Iterable
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

from mgk._core.heads import pair_heads


class MixtureArgs(NamedTuple):
    """Arguments of one mixture attention call, in the order of `torch.ops.mgk.mixture_forward`.

    In launch configurations, which depend on layouts alone, the tensor fields hold `TensorLayout`s.
    """

    query: Tensor  # [B, H, L, D]
    keys: Tensor  # [B, Hk, S, D] if shift is given, else [B, Hk, M, S, D]
    value: Tensor  # [B, Hv, S, E]
    shift: Tensor | None  # [Hk, M, D]
    bias: Tensor | None  # log prior and masks that are the same for all queries, broadcastable to [B, Hk, M, S]
    scale_t: Tensor | None  # [Hk, 1 or M], replaces scale
    tau_t: Tensor | None  # [Hk], replaces tau
    mask: Tensor | None  # bool or additive, broadcastable to [B, H, L, S]
    seed: Tensor | None  # of dropout, [1]
    cu_q: Tensor | None  # cumulative lengths of packed sequences, int32
    cu_k: Tensor | None
    scale: float
    tau: float
    constant: float  # log prior of every component if there is no bias
    dropout_p: float
    causal: int  # 0 no, 1 top-left, 2 bottom-right
    hard: bool
    max_q: int  # longest packed sequence, or L
    max_k: int

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The fields before scale."""
        return self[:NUM_TENSORS]

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The fields from scale on."""
        return self[NUM_TENSORS:]

    @property
    def components(self) -> int:
        return self.keys.shape[2] if self.shift is None else self.shift.shape[1]

    @property
    def head_counts(self) -> tuple[int, int, int]:
        """Numbers of key heads, value heads and pair heads: the fewest that both can be repeated to."""
        key_heads, value_heads = self.keys.shape[1], self.value.shape[1]
        return key_heads, value_heads, pair_heads(key_heads, value_heads)

    @property
    def value_group(self) -> int:
        """Query heads per value head, or 0 if there are as many value heads as key heads."""
        key_heads, value_heads, _ = self.head_counts
        return 0 if key_heads == value_heads else self.query.shape[1] // value_heads

    @property
    def num_sequences(self) -> int:
        return self.query.shape[0] if self.cu_q is None else self.cu_q.shape[0] - 1


# The first fields are tensors.
NUM_TENSORS = MixtureArgs._fields.index("scale")

# Values of the fields that an operator does not take.
_OMITTED: dict[str, Any] = {
    "bias": None, "seed": None, "cu_q": None, "cu_k": None, "constant": 0.0, "dropout_p": 0.0, "max_q": 0, "max_k": 0,
}  # fmt: skip


def without_fields(args: MixtureArgs, without: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the fields except those named in `without`, in order: the arguments of an operator with `schema`."""
    return tuple([x for name, x in zip(MixtureArgs._fields, args, strict=True) if name not in without])


def from_fields(values: Iterable[Any], without: tuple[str, ...]) -> MixtureArgs:
    """Return the arguments of which `values` are the fields except those named in `without`."""
    names = [name for name in MixtureArgs._fields if name not in without]
    return MixtureArgs(**dict(zip(names, values, strict=True)), **{name: _OMITTED[name] for name in without})


_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", int: "SymInt", bool: "bool"}


def schema(outputs: int, before: str = "", without: tuple[str, ...] = (), after: str = "") -> str:
    """Return the schema of an operator that takes the fields of `MixtureArgs`.

    Args:
        outputs: Number of tensors it returns.
        before: Arguments that precede them.
        without: Fields of `MixtureArgs` that the operator does not take.
        after: Arguments that follow them.
    """
    types: dict[str, Any] = get_type_hints(MixtureArgs)
    arguments = [f"{_SCHEMA_TYPES[types[name]]} {name}" for name in MixtureArgs._fields if name not in without]
    arguments = [*([before] if before else []), *arguments, *([after] if after else [])]
    return f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * outputs)})"
