"""Mutants of `tests/mutants.py`: a line of a file, a wrong form of it, and the tests that must fail."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One wrong line.

    Attributes:
        file: Path from the root of the repository.
        original: Text that occurs once in the file.
        mutated: Its replacement.
        tests: Arguments of pytest; tests of kernels run under Triton's interpreter.
        equivalence: Why no test can fail, for a mutant that changes no result.
    """

    file: str
    original: str
    mutated: str
    tests: tuple[str, ...]
    equivalence: str = ""

    @property
    def description(self) -> str:
        """Both texts in one line."""
        return " ".join(f"{self.original} -> {self.mutated}".replace("|", "or").split())


ROTARY = ("tests/test_rotary.py",)
CACHE = ("tests/test_cache.py",)
RESUME = ("tests/training/test_resumed_state.py",)
IDENTITIES = ("tests/test_identities.py",)
PADDING = ("tests/backends/test_masked_padding.py",)
SAFE = ("tests/kernels/mixture/test_safe_range.py",)
COUNTS = ("tests/kernels/mixture/test_em_counts.py",)
KERNEL_PADDING = ("tests/kernels/mixture/test_masked_padding.py",)
EM = ("tests/core/test_em.py", "--deselect", "tests/core/test_em.py::test_two_ranks_equal_one_process")
FEATURES = ("tests/test_features.py",)
MASKS = ("tests/core/test_masks.py",)
DATA = ("tests/training/test_data.py",)
SAMPLING = ("tests/models/test_sampling.py",)
WINDOW = ("tests/models/test_sliding_window.py",)
STRESS = ("tests/backends/test_stress.py",)
FACTORED = ("tests/backends/test_factored.py",)
GPUS = ("tests/backends/test_unsupported_gpus.py",)
SELECTION = ("tests/backends/test_selection.py",)
DECODER = ("tests/models/test_decoder.py",)
ATTENTION = ("tests/test_attention.py",)
SOFTMAX = ("tests/core/test_from_softmax.py",)

MUTANTS = [
    # The mutants of the defect list.
    Mutant("mgk/rotary.py", "torch.promote_types(x.dtype, torch.float32)", "x.dtype", ROTARY),
    Mutant("mgk/cache.py", "self.padded = self.padded and length > 0", "self.padded = False", CACHE),
    Mutant(
        "mgk/cache.py",
        "        for buffer in self._buffers:\n            buffer.copy_(",
        "        for buffer in self._buffers[:2]:\n            buffer.copy_(",
        CACHE,
    ),
    Mutant("mgk/training/module.py", "seed_of(self.seed, 2, batch_idx,", "seed_of(self.seed, 2, 0,", RESUME),
    Mutant("mgk/training/module.py", "torch.default_generator.manual_seed(seed)", "pass", RESUME),
    Mutant("mgk/training/module.py", "counts @ means", "counts.mean() * means.sum(0)", RESUME),
    Mutant("mgk/training/objectives/base.py", "float(value) * len(indices)", "float(value)", RESUME),
    Mutant("mgk/training/module.py", 'self.best = dict(checkpoint["best"])', "pass", RESUME),
    Mutant(
        "mgk/attention.py",
        "check_mask(args.combined_mask(query, length), query, length)",
        "None if query.shape[2] == 1 else check_mask(args.combined_mask(query, length), query, length)",
        CACHE,
    ),
    Mutant("mgk/kernels/mixture/tile.py", "SAFE_RANGE = tl.constexpr(80.0)", "SAFE_RANGE = tl.constexpr(160.0)", SAFE),
    Mutant("mgk/kernels/mixture/fwd.py", "slack = 2 * tl.max(score_bound, 0)", "slack = tl.max(score_bound, 0)", SAFE),
    Mutant("mgk/kernels/mixture/decode.py", "last = min(last, 1)", "last = last", SAFE),
    Mutant("mgk/kernels/mixture/decode.py", "S - L if CAUSAL == 2", "S - L + 1 if CAUSAL == 2", SAFE),
    Mutant(
        "mgk/kernels/mixture/em_counts.py",
        "tl.where(valid & (o_j < S)[:, None], 1.0, 0.0)",
        "tl.where(valid, 1.0, 0.0)",
        COUNTS,
        "keys beyond the end are not stored",
    ),
    Mutant("mgk/kernels/mixture/em_counts.py", "valid = tl.zeros([1, BM], tl.int1) | (o_i < L)[None, :]",
           "valid = tl.zeros([1, BM], tl.int1) | (o_i < BM * 1000)[None, :]", COUNTS),
    Mutant("mgk/backends/triton.py", "tau = tau.repeat_interleave(query.shape[1] // tau.shape[0]).view(1, -1, 1)",
           "tau = tau.repeat(query.shape[1] // tau.shape[0]).view(1, -1, 1)", SAFE),
    # Rotary positions and caches.
    Mutant("mgk/rotary.py", "first * cosine - second * sine", "first * cosine + second * sine", ROTARY),
    Mutant("mgk/rotary.py", "-steps / max(pairs, 1)", "-steps / (pairs + 1)", ROTARY),
    Mutant("mgk/cache.py", "self.length = self._check_length(length)", "self.length = min(self.length, length)", CACHE),
    Mutant("mgk/cache.py", "self.length + new_tokens > self.max_length", "self.length > self.max_length", CACHE),
    Mutant("mgk/cache.py", "torch.arange(self.length, self.length + x.shape[1],", "torch.arange(0, x.shape[1],", CACHE),
    Mutant("mgk/cache.py", "self.batch_size = len(rows)\n\n    def enlarge", "pass\n\n    def enlarge", CACHE),
    Mutant("mgk/cache.py", "self.length, self.padded = 0, False", "self.length = 0", CACHE),
    # Operators and the equations.
    Mutant("mgk/equations.py", "(tau * scale)[..., 0] * query_norm", "scale[..., 0] * query_norm", IDENTITIES),
    Mutant("mgk/equations.py", "logits.masked_fill(empty, 0)", "logits", STRESS),
    Mutant("mgk/equations.py", ".clamp(max=torch.finfo(x.dtype).max)", "", STRESS),
    Mutant("mgk/equations.py", "logits = logits.amax(-2, keepdim=True)", "logits = logits.mean(-2, keepdim=True)",
           IDENTITIES),
    Mutant("mgk/_core/calls.py", "return replace(self, keys=keys, value=self.value.masked_fill(masked_values, 0))",
           "return replace(self, keys=keys)", PADDING),
    Mutant("mgk/_core/masks.py", "as_bool(mask).any(-2)", "as_bool(mask).all(-2)", IDENTITIES),
    Mutant("mgk/_core/masks.py", "mask >= MASK_VALUE", "mask > -math.inf", MASKS),
    Mutant("mgk/_core/masks.py", "last = last + (keys - queries)", "last = last + (keys - queries) + 1", STRESS),
    Mutant("mgk/_core/masks.py", "rows - starts[segment]", "rows", MASKS),
    Mutant("mgk/_core/linear_features.py", "value = value.masked_fill(masked.unsqueeze(-1), 0)", "pass", PADDING),
    Mutant("mgk/_core/linear_features.py", "if log_prior is None else log_scale + log_prior",
           "if log_prior is None else log_scale", FEATURES),
    Mutant("mgk/_core/em.py", "pairs += rows.stop - rows.start", "pairs += 1", EM),
    Mutant("mgk/_core/em.py", "- 2 * cross", "- cross", EM),
    Mutant("mgk/_core/priors.py", "torch.lerp(new, prior.to(new.dtype), self.momentum)",
           "torch.lerp(prior.to(new.dtype), new, self.momentum)", EM),
    Mutant("mgk/_core/priors.py", "torch.where(pairs > 0, new, prior.to(new.dtype))", "new", EM),
    Mutant("mgk/_core/from_softmax.py", "layer.tau.zero_()", "layer.tau.fill_(0.01)", SOFTMAX),
    Mutant("mgk/features.py", "x.masked_fill(positive, 0).exp()", "x.masked_fill(positive, 0).exp() - 1e-3", FEATURES),
    Mutant("mgk/functional.py", "lse = lse.masked_fill(lse == -torch.inf, -torch.inf)", "pass", STRESS),
    # Backends.
    Mutant("mgk/backends/cpu_flash.py", "output[..., -1] = -grad_lse", "output[..., -1] = 0", PADDING),
    Mutant("mgk/_core/logit_terms.py", "squared_norms(keys)).clamp(min=MASK_VALUE)", "squared_norms(keys))", STRESS),
    Mutant("mgk/backends/cpu_factored.py", "(total < MIN_SUM) & ~is_masked", "is_masked & ~is_masked", FACTORED),
    Mutant("mgk/backends/cpu_factored.py", "block.diagonal < products.shape[2]", "block.diagonal >= 0", FACTORED),
    Mutant("mgk/backends/cpu_factored.py", "(grad_lse - (grad_output * output).sum(-1))",
           "(-(grad_output * output).sum(-1))", FACTORED),
    Mutant("mgk/backends/cpu_factored.py", "sums[queries] = -total", "sums[queries] = total", FACTORED),
    Mutant("mgk/backends/cpu_factored.py", "row_max[queries] = log_factor = logits.amax((0, -1))",
           "log_factor = logits.amax((0, -1))", FACTORED),
    Mutant("mgk/backends/cpu_factored.py", ".masked_fill_(lse == -math.inf, 0)", "", FACTORED),
    Mutant("mgk/backends/cpu_factored.py",
           "    with without_autocast(query):\n        factors = _factors(query_term, key_term)\n        minus_delta",
           "    if True:\n        factors = _factors(query_term, key_term)\n        minus_delta", FACTORED),
    Mutant("mgk/backends/chunked.py", "dtype=torch.bool, device=query.device).tril()\n",
           "dtype=torch.bool, device=query.device)\n", FEATURES),
    Mutant("mgk/backends/triton.py", "TENSOR_MEMORY, TENSOR_MEMORY_TRITON = (10, 11)",
           "TENSOR_MEMORY, TENSOR_MEMORY_TRITON = (11,)", GPUS),
    Mutant("mgk/backends/triton.py", "torch.version.hip is not None", "False", GPUS),
    Mutant("mgk/backends/__init__.py", "if call.query.dtype == torch.float64:", "if False:", SELECTION),
    # Kernels.
    Mutant("mgk/kernels/mixture/preprocess.py", "finite = finite + (tl.minimum(norms[r], FP32_MAX),)",
           "finite = finite + (norms[r],)", KERNEL_PADDING),
    Mutant("mgk/kernels/mixture/preprocess.py", "b_key_term = tl.where(b_bias.to(tl.float32) < MASK_VALUE, ",
           "b_key_term = tl.where(b_bias.to(tl.float32) < -float(\"inf\"), ", KERNEL_PADDING),
    Mutant("mgk/kernels/mixture/decode.py", "b_norm = 0.5 * tau * tl.minimum(tl.sum(b_k * b_k, 1), FP32_MAX)",
           "b_norm = 0.5 * tau * tl.sum(b_k * b_k, 1)", KERNEL_PADDING),
    Mutant("mgk/kernels/mixture/exp2.py", "replace_inf(key, LOWEST_TERM)", "replace_inf(key, LOWEST)", KERNEL_PADDING),
    Mutant("mgk/kernels/mixture/exp2.py", "tl.constexpr(127.0), tl.constexpr(8.0)",
           "tl.constexpr(127.0), tl.constexpr(127.0)", KERNEL_PADDING),
    Mutant("mgk/kernels/mixture/em_counts.py", "COUNT_RANGE = tl.constexpr(100.0)", "COUNT_RANGE = tl.constexpr(400.0)",
           COUNTS),
    # Models and training.
    Mutant("mgk/models/sliding_window.py", ">= starts[batch, None]", ">= 0", WINDOW),
    Mutant("mgk/models/sliding_window.py", "last_positions.append(len(inputs) - 1)", "pass", WINDOW),
    Mutant("mgk/models/generation.py", "before >= self.top_p", "before > 1.0", SAMPLING),
    Mutant("mgk/models/generation.py", "manual_seed(sampling.seed)", "manual_seed(0)", SAMPLING),
    Mutant("mgk/models/generation.py", "max(1, context // 2)", "max(1, context)", SAMPLING),
    Mutant("mgk/training/data.py", "seed_of(self.seed, epoch)", "seed_of(self.seed, 0)", DATA),
    Mutant("mgk/training/data.py", "(part * self.world_size + self.rank) * self.size", "self.rank * self.size", DATA),
    Mutant("mgk/training/data.py", "dtype=torch.long), 0)] * missing", "dtype=torch.long), 1)] * missing", DATA),
    Mutant("mgk/training/callbacks.py", "objective.is_better(metrics[\"dev\"], module.best[objective.metric])", "True",
           RESUME),
    Mutant("mgk/training/objectives/base.py", "value > best if cls.higher_is_better else value < best", "value > best",
           RESUME),
]  # fmt: skip
