"""Call plans: the launches and buffer sizes of a call, computed once for the layouts of its tensors.

A call with a plan takes one workspace per pass and launches its kernels by address. Plans exist for calls in bf16 and
fp16 without masks, dropout, packed sequences, and tensors as scale or tau. Until its kernels are compiled, a plan calls
`forward_into` and `launch_backward` with views of the workspace: both cases save the same tensors for the backward
pass, which activation checkpointing compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mgk._core.integers import ceil_div
from mgk.kernels import jit_cache
from mgk.kernels.autograd import no_double_backward
from mgk.kernels.jit_cache import LaunchSpec, can_launch_by_address, is_aligned, launch_by_address
from mgk.kernels.mixture import experimental, launch
from mgk.kernels.mixture.args import NUM_TENSORS, MixtureArgs
from mgk.kernels.mixture.launch_config import (
    COMPONENT_GEMM_WIDTH,
    FULL_PRIOR_GRAD,
    KEYS_PER_TILE,
    NO_PRIOR_GRAD,
    SUMMED_PRIOR_GRAD,
    BackwardConfig,
    backward_config,
    forward_config,
    layouts,
    padded_width,
)
from mgk.kernels.tma import Layout, descriptor_arguments, encode

ALIGNMENT = 128  # bytes; TMA needs 16
MAX_BACKWARD_PLANS = 32  # per plan: one for each layout of the output's gradient
unwrap = torch._C._functorch.unwrap_if_dead


class Workspace:
    """Buffers in one allocation of fp32 numbers."""

    def __init__(self, **shapes: tuple[int, ...]):
        self.shapes = shapes
        self.offsets: dict[str, int] = {}  # in bytes
        size = 0
        for name, shape in shapes.items():
            self.offsets[name] = size
            size += ceil_div(4 * torch.Size(shape).numel(), ALIGNMENT) * ALIGNMENT
        self.numel = size // 4

    def view(self, memory: Tensor, name: str) -> Tensor:
        """Return a buffer as a tensor."""
        shape, start = self.shapes[name], self.offsets[name] // 4
        return memory[start : start + torch.Size(shape).numel()].view(shape)


def strides_of(*tensors: Tensor | None) -> list[Any]:
    """Return the strides of tensors."""
    return [None if x is None else x.stride() for x in tensors]


def tensor_layout(x: Tensor, rows: int) -> Layout:
    """Return the layout of a descriptor of a tensor with blocks of `rows` rows."""
    return Layout(x.shape, x.stride(), (*[1] * (x.dim() - 2), rows, padded_width(x.shape[-1])))


def matrix_layout(shape: tuple[int, int], block: tuple[int, int]) -> Layout:
    """Return the layout of a descriptor of a contiguous matrix."""
    return Layout(shape, (shape[1], 1), block)


def operand_layout(num_rows: int, rows: int) -> Layout | None:
    """Return the layout of a descriptor of an operand of the component GEMM, None without one (0 rows)."""
    width = COMPONENT_GEMM_WIDTH
    return matrix_layout((num_rows, width), (rows, width)) if num_rows else None


class CallPlan:
    """A call that is repeated with other tensors of the same layouts.

    A plan holds the launch configurations, the layout of the workspace, the properties of TMA descriptors, and the
    backward plans by layout of the output's gradient; it holds no tensors. It is valid for tensors with the shapes,
    strides, dtypes and device of the first call, which `repeated_call_key` ensures, and while the settings
    of the kernels are unchanged (`is_current`).
    """

    def __init__(self, args: MixtureArgs, prior_shape: tuple[int, ...] | None, needs_gradients: bool):
        """Prepare a call.

        Args:
            args: The arguments; bias is 4-dimensional.
            prior_shape: Shape of the log prior that calls pass, or None.
            needs_gradients: Whether the backward pass follows.
        """
        query, value = args.query, args.value
        empty: Any = (None,) * NUM_TENSORS
        self.args = MixtureArgs(*empty, *args.numbers)  # no references to tensors
        self.prior_shape, self.needs_gradients = prior_shape, needs_gradients
        self.bias_shape = None if args.bias is None else args.bias.shape
        self.bias_dtype = None if args.bias is None else args.bias.dtype
        self.device, self.settings = query.get_device(), launch.settings()
        (B, H, L, D), HK, (S, E), M = query.shape, args.keys.shape[1], value.shape[2:], args.components
        self.sizes = D, HK, M
        self.shifted = args.shift is not None
        out = launch.empty_like_bshd(query, E)
        self.out_shape, self.out_strides = out.shape, out.stride()
        self.saved_strides = strides_of(query, args.keys, value, args.shift, out)
        tiles = launch.count_key_tiles(None, B, S)
        stats_shape = (HK, tiles, 4)
        flags = launch.call_flags(args, tiles)
        self.tma = not flags.small and launch.supports_tma(args.keys, value)
        self.flags = flags
        self.forward_config = forward_config(layouts(*args.tensors, out), flags, self.tma, needs_gradients)
        self.workspace = Workspace(
            prepared=(2, HK, M, tiles * KEYS_PER_TILE), stats=stats_shape, lse=(B, H, L) if needs_gradients else (0,),
            flags=(self.forward_config.num_flags,),
        )  # fmt: skip
        config = self.forward_config
        self.forward_specs = config.preprocess, config.attend
        self.descriptors = None
        if self.tma:
            rows = config.block_n
            self.descriptors = descriptor_arguments(
                config.attend, tensor_layout(args.keys, rows), tensor_layout(value, rows),
                operand_layout(config.operand_keys, rows),
            )  # fmt: skip
        self.backward_plans: dict[Any, BackwardPlan | None] = {}

    def __call__(self, *tensors: Tensor | None) -> Tensor:
        """Return the output for query, keys, value, shift and log prior."""
        if self.needs_gradients:
            return apply_plan(self, *[x if x is None else unwrap(x) for x in tensors])
        return self.forward(*tensors)[0]

    def is_current(self) -> bool:
        """Return whether the settings of the kernels are those of the plan."""
        return self.settings == launch.settings()

    def full_args(self, query: Any, keys: Any, value: Any, shift: Any, prior: Any = None) -> MixtureArgs:
        """Return the arguments with tensors."""
        bias = None if prior is None else prior.view(self.bias_shape)
        return self.args._replace(query=query, keys=keys, value=value, shift=shift, bias=bias)

    def forward(self, query: Any, keys: Any, value: Any, shift: Any, prior: Any) -> tuple[Tensor, Tensor]:
        """Return the output and the workspace."""
        out = query.new_empty_strided(self.out_shape, self.out_strides)
        memory = query.new_empty(self.workspace.numel, dtype=torch.float32)
        config = self.forward_config
        addresses = [x if x is None else x.data_ptr() for x in (query, keys, value, shift, prior)]
        if not can_launch_by_address(self.device, addresses, self.forward_specs):
            view = self.workspace.view
            lse = view(memory, "lse") if self.needs_gradients else None
            args = self.full_args(query, keys, value, shift, prior)
            launch.forward_into(out, lse, view(memory, "prepared"), view(memory, "stats"), args)
            return out, memory
        base = memory.data_ptr()
        prepared, stats, lse_address, flags = [base + offset for offset in self.workspace.offsets.values()]
        if not config.num_flags:
            flags = stats
        operand = launch.empty_operand(memory, config.operand_keys)
        operand_address = None if operand is None else operand.data_ptr()
        at_query, at_keys, at_value, at_shift, at_prior = addresses
        args = self.args
        stream = jit_cache.current_stream(self.device)
        launch_by_address(
            config.preprocess, self.device, stream,
            (at_keys, at_shift, at_prior, None, None, None, prepared, stats, operand_address, args.scale, args.tau,
            args.constant),
        )  # fmt: skip
        k, v, k_operand = encode(self.descriptors, self.device, at_keys, at_value, operand_address)
        launch_by_address(
            config.attend, self.device, stream,
            (at_query, *k, *v, at_shift, None, None, None, None, None, None, prepared, stats,
            flags, *k_operand, out.data_ptr(), lse_address if self.needs_gradients else None,
            args.scale, args.tau, 0.0),
        )  # fmt: skip
        return out, memory

    def backward(
        self, grad: Tensor, out: Tensor, memory: Tensor, tensors: tuple[Any, ...], prior_grad: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Return dq, dk, dv, d log prior per key or None, and the summed gradients, as `launch_backward` does."""
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        addresses = [x if x is None else x.data_ptr() for x in (*tensors, grad, out)]
        plan = None
        # Hooks of saved tensors may change strides: `torch.autograd.graph.save_on_cpu`, for example.
        if is_aligned([grad.data_ptr(), *addresses[:3]]) and strides_of(*tensors, out) == self.saved_strides:
            # Deterministic algorithms may have been switched on since the forward pass.
            key = grad.stride(), prior_grad, experimental.one_pass_allowed()
            plan = self.backward_plans.get(key)
            if plan is None and key not in self.backward_plans:
                if len(self.backward_plans) >= MAX_BACKWARD_PLANS:
                    self.backward_plans.clear()
                plan = self.backward_plans[key] = self.plan_backward(grad, out, tensors, prior_grad)
        if plan is None or not can_launch_by_address(self.device, addresses, plan.specs):
            lse, prepared, stats = (self.workspace.view(memory, name) for name in ("lse", "prepared", "stats"))
            dq, dk, dv, dbias, sums, _ = launch.launch_backward(
                grad, None, out, lse, prepared, stats, self.full_args(*tensors), False, prior_grad
            )
            return dq, dk, dv, dbias, sums
        return plan.run(grad, out, memory, tensors, addresses)

    def plan_backward(
        self, grad: Tensor, out: Tensor, tensors: tuple[Any, ...], prior_grad: int
    ) -> BackwardPlan | None:  # fmt: skip
        """Return the launches of the backward pass; None if key and value heads differ in number."""
        args = self.full_args(*tensors)  # without bias, which is part of the prepared keys
        if args.value_group:
            return None
        flags = self.flags._replace(one_pass=not self.flags.small and experimental.is_one_pass(args))
        tma_keys = self.tma and not flags.one_pass
        tma_queries = not flags.small and launch.supports_tma(args.query, grad)
        tensor_layouts = layouts(*args.tensors, out, grad, None)
        config = backward_config(tensor_layouts, flags, tma_keys, tma_queries, False, prior_grad)
        prior_keys = args.value.shape[2] if prior_grad == FULL_PRIOR_GRAD else 0
        return BackwardPlan(self, config, args, grad, tma_keys, tma_queries, prior_keys)

    def gradients(self, ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, keys, value, shift and log prior."""
        out, memory, *tensors = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        _, _, _, _, need_shift, need_prior = ctx.needs_input_grad
        prior_grad, bias_shape = NO_PRIOR_GRAD, self.bias_shape
        if need_prior and bias_shape is not None:
            prior_grad = SUMMED_PRIOR_GRAD if bias_shape[0] == bias_shape[3] == 1 else FULL_PRIOR_GRAD
        dq, dk, dv, dbias, sums = self.backward(grad, out, memory, tuple(tensors), prior_grad)
        D, HK, M = self.sizes
        dshift = dprior = None
        if need_shift:
            dshift = sums.as_strided((HK, M, D), (M * D, D, 1)).to(tensors[3].dtype)
        if prior_grad == SUMMED_PRIOR_GRAD:
            dbias = sums.as_strided((1, HK, M, 1), (HK * M, M, 1, 1), HK * (M * D * self.shifted + 1 + M))
        if dbias is not None and bias_shape is not None and self.prior_shape is not None:
            dbias = dbias if dbias.shape == bias_shape else dbias.sum_to_size(bias_shape)
            dprior = dbias.view(self.prior_shape).to(self.bias_dtype)
        return None, dq, dk, dv, dshift, dprior


class BackwardPlan:
    """The launches of the backward pass of a plan, for one layout of the output's gradient."""

    def __init__(
        self, plan: CallPlan, config: BackwardConfig, args: MixtureArgs, grad: Tensor, tma_keys: bool,
        tma_queries: bool, prior_keys: int,
    ):  # fmt: skip
        self.plan, self.config, self.prior_keys = plan, config, prior_keys
        self.specs: tuple[LaunchSpec, ...] = (config.dq, *(spec for spec, _, _ in config.dkdv), config.add_parts)
        if config.finish is not None:
            self.specs += (config.finish,)
        if config.key_operand_keys:
            self.specs += (config.write_key_operand,)
        words = COMPONENT_GEMM_WIDTH // 2  # fp32 words per row of a bf16 operand
        self.workspace = Workspace(
            row_vectors=config.row_vectors, spread=(config.num_spreads,), flags=(config.num_flags,), parts=config.parts,
            key_operand=(config.key_operand_keys, words), row_operand=(config.row_operand_rows, words),
            query_sums=config.query_sums,
        )  # fmt: skip
        self.num_sums = config.parts[1] * config.parts[2]
        gradients = [launch.empty_like_bshd(x) for x in (args.query, args.keys, args.value)]
        self.gradient_layouts = [(x.shape, x.stride()) for x in gradients]
        self.dq_descriptors = None
        self.dkdv_descriptors: list[Any] = [None] * len(config.dkdv)
        if tma_keys:
            rows = config.dq_block_n
            self.dq_descriptors = descriptor_arguments(
                config.dq, tensor_layout(args.keys, rows), tensor_layout(args.value, rows),
                operand_layout(config.key_operand_keys, rows),
            )  # fmt: skip
        if tma_queries:
            self.dkdv_descriptors = [
                descriptor_arguments(
                    spec, tensor_layout(args.query, rows), tensor_layout(grad, rows),
                    matrix_layout(config.row_vectors, (1, rows)) if tma_rows else None,
                    operand_layout(config.row_operand_rows, rows),
                    None if config.finish is None
                    else matrix_layout(config.query_sums, (rows, padded_width(config.query_sums[1]))),
                )
                for spec, rows, tma_rows in config.dkdv
            ]  # fmt: skip

    def run(
        self, grad: Tensor, out: Tensor, memory: Tensor, tensors: tuple[Any, ...], addresses: list[Any]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
        """Launch the kernels by address; arguments as `launch_backward` passes them."""
        plan, config = self.plan, self.config
        query, keys, value, _ = tensors
        dq, dk, dv = [x.new_empty_strided(*y) for x, y in zip((query, keys, value), self.gradient_layouts, strict=True)]
        sums, buffers = memory.new_empty(self.num_sums), memory.new_empty(self.workspace.numel)
        at_query, at_keys, at_value, at_shift, at_grad, at_out = addresses
        saved, base = memory.data_ptr(), buffers.data_ptr()
        prepared, stats, lse, _ = [saved + offset for offset in plan.workspace.offsets.values()]
        rows, spread, flags, parts, key_operand, row_operand, query_sums = [
            base + offset for offset in self.workspace.offsets.values()
        ]
        dbias = dbias_address = None
        if self.prior_keys:
            B, _, S, _ = value.shape
            _, HK, M = plan.sizes
            dbias = memory.new_empty(B, HK, M, S)
            dbias_address = dbias.data_ptr()
        floats = plan.args.scale, plan.args.tau, 0.0
        inputs = (at_shift, None, None, None, None, None, None, prepared, stats)
        device, stream = plan.device, jit_cache.current_stream(plan.device)
        if config.key_operand_keys:
            factors = prepared + 4 * (config.key_operand_keys * plan.sizes[2])
            launch_by_address(config.write_key_operand, device, stream, (factors, key_operand))
        if not config.num_flags:
            flags = spread
        row_source = row_operand if config.row_operand_rows else None
        sums_source = None if config.finish is None else query_sums
        k, v, k_operand = encode(
            self.dq_descriptors, device, at_keys, at_value, key_operand if config.key_operand_keys else None
        )
        dq_arguments = (
            at_query, *k, *v, *inputs, at_out, lse, at_grad, None, dq.data_ptr(), parts, rows, row_source, *k_operand,
            sums_source, spread, flags, parts, *floats,
        )  # fmt: skip
        launch_by_address(config.dq, device, stream, dq_arguments)
        dk_address, dv_address = dk.data_ptr(), dv.data_ptr()
        for (spec, _, _), descriptors in zip(config.dkdv, self.dkdv_descriptors, strict=True):
            q, do, row_vectors, operand, q_sums = encode(
                descriptors, device, at_query, at_grad, rows, row_source, sums_source
            )
            launch_by_address(
                spec, device, stream,
                (*q, at_keys, at_value, *inputs, *do, *row_vectors, *operand, *q_sums, spread, flags, dk_address,
                dv_address, parts if dbias_address is None else dbias_address, parts, *floats),
            )  # fmt: skip
        if config.finish is not None:
            launch_by_address(config.finish, device, stream, dq_arguments)
        launch_by_address(config.add_parts, device, stream, (parts, sums.data_ptr()))
        return dq, dk, dv, dbias, sums


class PlannedAttention(torch.autograd.Function):
    """The differentiable call of a plan."""

    @staticmethod
    def forward(ctx: Any, plan: CallPlan, *tensors: Any) -> Tensor:
        out, memory = plan.forward(*tensors)
        ctx.save_for_backward(out, memory, *tensors[:4])
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: CallPlan = ctx.plan
        return plan.gradients(ctx, grad)


# `apply` without its check for function transforms: calls under them have no plan.
apply_plan: Callable[..., Tensor] = super(torch.autograd.Function, PlannedAttention).apply


def make_call_plan(args: MixtureArgs, prior_shape: tuple[int, ...] | None, needs_gradients: bool) -> CallPlan | None:
    """Return a plan, or None if the call is not supported, has no pairs or unaligned tensors, or runs in chunks."""
    query, value = args.query, args.value
    if query.dtype not in (torch.bfloat16, torch.float16) or args.dropout_p > 0 or args.cu_q is not None:
        return None
    if args.mask is not None or args.scale_t is not None or args.tau_t is not None:
        return None
    if query.numel() == 0 or value.numel() == 0:
        return None
    # TMA reads these if they are aligned. A plan for others would not use TMA for aligned ones either.
    if not is_aligned([x.data_ptr() for x in (query, args.keys, value)]):
        return None
    if not needs_gradients and launch.chunked_heads(args) < query.shape[0] * args.keys.shape[1]:
        return None
    return CallPlan(args, prior_shape, needs_gradients)
