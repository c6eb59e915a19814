"""Calls with large finite numbers in keys and values that a query does not attend to."""

import torch

import mgk

KEYS, PADDED = 9, 7  # number of keys, and the first one that is masked
MASKS = ["key", "head", "pair", "float", "causal"]
SIMILARITIES = ["dot", 0.5, "gaussian", "tau"]


def options_of(mask, queries):
    """Return the options of a call that mask the keys from PADDED on."""
    if mask == "causal":
        return {"is_causal": True}
    attend = (torch.arange(KEYS) < PADDED).expand(1, 1 if mask == "key" else 2, queries if mask == "pair" else 1, KEYS)
    if mask == "float":
        return {"attn_mask": torch.zeros(attend.shape).masked_fill(~attend, -torch.inf)}
    return {"attn_mask": attend}


def results(
    op, size, *, mask, similarity, backend, assignment="soft", dtype=torch.float32, queries=PADDED, scales="unequal",
    value_size=None, gradients=True, device="cpu",
):  # fmt: skip
    """Return output, lse and all gradients of a call whose masked keys have entries ±size.

    Args:
        op: "mgk" or "smgk".
        size: Absolute value of the entries of masked keys.
        mask: One of MASKS. With "causal" the last queries attend to the large keys: the results leave them out.
        similarity: "dot", "gaussian", a number, or "tau", a tensor of zeros.
        backend: Name of the backend.
        assignment: "soft" or "hard".
        dtype: Data type of query, keys and value.
        queries: Number of queries.
        scales: "unequal", one per component, or "equal".
        value_size: Absolute value of the entries of masked values. Default: ordinary values.
        gradients: Whether to compute gradients; without, few queries run on the decode kernels.
        device: Device of all tensors.
    """
    generator = torch.Generator().manual_seed(0)
    queries = KEYS if mask == "causal" else queries
    shapes = {"query": (1, 2, queries, 5), "keys": (1, 1, 2, KEYS, 5), "value": (1, 1, KEYS, 4), "shift": (1, 2, 5)}
    leaves = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    leaves["log_prior"] = torch.randn(1, 2, 1, generator=generator)
    leaves["scale"] = 0.2 + torch.rand(1, 2 if scales == "unequal" else 1, generator=generator)
    if similarity == "tau":
        leaves["similarity"] = torch.zeros(1)
    signs = torch.randn(1, 1, 2, KEYS - PADDED, 5, generator=generator).sign()
    leaves["keys"][..., PADDED:, :] = size * signs
    if value_size is not None:
        leaves["value"][..., PADDED:, :] = value_size
    if op == "smgk":
        leaves["keys"] = leaves["keys"][:, :, 0]
    else:
        del leaves["shift"]
    for name in ("query", "keys", "value"):
        leaves[name] = leaves[name].to(dtype)
    leaves = {name: x.to(device).requires_grad_(gradients) for name, x in leaves.items()}
    inputs = [leaves[name] for name in ("query", "keys", "value", "shift") if name in leaves]
    options = {name: leaves[name] for name in leaves if name in ("log_prior", "scale", "similarity")}
    options = {"similarity": similarity, "assignment": assignment, "backend": backend} | options
    options |= {k: x.to(device) if torch.is_tensor(x) else x for k, x in options_of(mask, queries).items()}
    out, lse = getattr(mgk, f"{op}_attention")(*inputs, return_lse=True, **options)
    out, lse = out[:, :, :PADDED], lse[:, :, :PADDED]
    if not gradients:
        return {"out": out, "lse": lse}
    weights = torch.linspace(-1, 1, out.numel(), device=device).view_as(out).to(dtype)
    grads = torch.autograd.grad(
        (out * weights).sum() + lse.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, grads, strict=True))}


def check_unchanged(op, size, *, backend, dtype=torch.float32, value_size=None, device="cpu", **options):
    """Check that large masked keys and values give the results of "eager" with zeros instead."""
    zero = None if value_size is None else 0.0
    expected = results(op, 0.0, backend="eager", dtype=dtype, value_size=zero, **options)
    output = results(op, size, backend=backend, dtype=dtype, value_size=value_size, device=device, **options)
    tolerance = 2e-5 if dtype == torch.float32 else 5e-3
    for name in expected:
        torch.testing.assert_close(
            output[name].cpu(), expected[name], rtol=tolerance, atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip
