"""Expectation maximization: updates of prior and variance from training batches."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mgk import Attention, MultiheadAttention, Variant, equations
from tests.support import oracle
from tests.support.exact import F64, close, randn

EMBED, H, HK, D, L, B, M = 12, 4, 2, 5, 9, 3, 3
VARIANCE = Variant("gaussian", "independent", "em", variance="em")


def make(variant="mgk-em", **options):
    options = {"head_dim": D, "num_components": M, "dtype": F64, **options}
    layer = Attention(EMBED, H, variant=variant, **options)
    if hasattr(layer.prior, "prior"):
        layer.prior.prior.copy_(randn(*layer.prior.prior.shape).softmax(1))
    return layer


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def gammas(layer, query, key=None, log_prior=None, scale=None, tau=1.0):
    """Return Eq. 11 with the layer's weights and current prior, [B, H, M, L, S]."""
    key = query if key is None else key
    q, k, heads = split(layer.query(query), H), layer.keys.projection(key), layer.num_kv_heads
    if layer.variant.keys == "shifted":
        keys = oracle.shifted(split(k, heads), layer.keys.shifts)
    else:
        keys = k.unflatten(-1, (heads, M, D)).permute(0, 2, 3, 1, 4)
    log_prior = layer.prior.prior.log()[..., : key.shape[1]] if log_prior is None else log_prior
    return oracle.responsibilities(q, keys, log_prior=log_prior, scale=scale, tau=tau).detach()


def counts(layer, gamma, allowed=None):
    """Return N_jr [Hk, M, S] and N_j, broadcastable to [S], over allowed pairs; query heads of a group are summed."""
    allowed = torch.ones(gamma.shape[0], 1, *gamma.shape[-2:], dtype=torch.bool) if allowed is None else allowed
    allowed = allowed.expand(gamma.shape[0], H, *gamma.shape[-2:])[:, :, None]
    count, pairs = (gamma * allowed).sum((0, 3)), allowed.sum((0, 3)).to(F64)  # [H, M, S], [H, 1, S]
    return (x.unflatten(0, (layer.num_kv_heads, -1)).sum(1) for x in (count, pairs))


def pooled(layer, gamma, allowed=None):
    count, pairs = counts(layer, gamma, allowed)
    return count.sum(-1, keepdim=True) / pairs.sum(-1, keepdim=True)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": HK}, {"num_kv_heads": 1}], ids=str)
@pytest.mark.parametrize("variant", ["mgk-em", "smgk-em", Variant("between", "shifted", "em")], ids=str)
def test_shared_prior_is_the_pooled_ratio(variant, options):
    layer, x = make(variant, is_causal=True, **options), randn(B, L, EMBED)
    if layer.tau is not None:
        layer.tau.data.copy_(torch.rand_like(layer.tau))
    gamma = gammas(layer, x, tau=1.0 if layer.tau is None else layer.tau)
    visible = oracle.allowed(L, L, "top-left")
    layer(x)
    close(layer.prior.prior, pooled(layer, gamma, visible))
    count, pairs = counts(layer, gamma, visible)
    assert ((count / pairs).mean(-1, keepdim=True) - layer.prior.prior).abs().max() > 1e-4
    close(layer.prior.prior.sum(1), torch.ones(layer.num_kv_heads, 1, dtype=F64))


@pytest.mark.parametrize("max_positions", [None, L + 3])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_uses_the_prior_before_the_update(causal, max_positions):
    layer, x = make(is_causal=causal, max_positions=max_positions), randn(B, L, EMBED)
    before = layer.eval()(x)
    close(layer.train()(x), before)
    assert (layer.eval()(x) - before).abs().max() > 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", ["mgk-em", "smgk-em"])
def test_prior_per_position_is_kept_for_unattended_positions(variant, causal):
    layer, x = make(variant, is_causal=causal, max_positions=L + 3, num_kv_heads=HK), randn(B, L, EMBED)
    start, gamma = layer.prior.prior.clone(), gammas(layer, x)
    layer(x)
    count, pairs = counts(layer, gamma, oracle.allowed(L, L, "top-left" if causal else None))
    close(layer.prior.prior[..., :L], count / pairs)
    assert torch.equal(layer.prior.prior[..., L:], start[..., L:])


MASKS = {
    "padding": {"key_padding_mask": torch.arange(L).expand(B, -1) >= torch.tensor([[L - 1], [3], [7]])},
    "bool": {"attn_mask": torch.arange(L * L).reshape(L, L) % 3 > 0},
    "heads": {"attn_mask": torch.arange(H * L * L).reshape(1, H, L, L) % 5 > 1},
    "float": {"attn_mask": torch.linspace(-2, 2, L * L, dtype=F64).reshape(L, L)},
}
MASKS["both"] = MASKS["padding"] | MASKS["bool"]
MASKS["float-both"] = MASKS["padding"] | MASKS["float"]


@pytest.mark.parametrize("max_positions", [None, L])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_masked_pairs_are_not_counted(masks, max_positions):
    """Check that an additive mask leaves a pair out if it is -inf, and otherwise does not change the counts."""
    layer, x = make(is_causal=True, max_positions=max_positions, num_kv_heads=HK), randn(B, L, EMBED)
    start, gamma = layer.prior.prior.clone(), gammas(layer, x)
    allowed = oracle.allowed(L, L, "top-left").expand(B, 1, L, L)
    if "key_padding_mask" in masks:
        real = ~masks["key_padding_mask"]
        allowed = allowed & real[:, None, None] & real[:, None, :, None]
    if "attn_mask" in masks and masks["attn_mask"].dtype == torch.bool:
        allowed = allowed & masks["attn_mask"]
    layer(x, **masks)
    if max_positions is None:
        close(layer.prior.prior, pooled(layer, gamma, allowed))
    else:
        count, pairs = counts(layer, gamma, allowed)
        close(layer.prior.prior, torch.where(pairs > 0, count / pairs, start))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_additive_mask_in_any_precision_leaves_out_masked_keys(dtype):
    layer = make(max_positions=L).to(dtype)
    start, mask = layer.prior.prior.clone(), torch.zeros(L, L, dtype=dtype)
    mask[:, 4:] = -torch.inf
    layer(randn(B, L, EMBED).to(dtype), attn_mask=mask)
    assert torch.equal(layer.prior.prior[..., 4:], start[..., 4:])
    assert not torch.equal(layer.prior.prior[..., :4], start[..., :4])


@pytest.mark.parametrize("variant", ["mgk-em", VARIANCE], ids=["prior", "variance"])
def test_values_of_padding_do_not_matter(variant):
    layer, x, padding = make(variant), randn(B, L, EMBED), MASKS["padding"]["key_padding_mask"]
    results = []
    for junk in (0.0, 50.0):
        twin = copy.deepcopy(layer)
        twin(x.masked_fill(padding[..., None], junk), key_padding_mask=padding)
        results.append(em_state(twin))
    close(*results)


def test_all_queries_of_cross_attention_are_counted():
    layer, x, padding = make(), randn(B, L, EMBED), MASKS["padding"]["key_padding_mask"]
    gamma = gammas(layer, x)
    layer(x, x.masked_fill(padding[..., None], 50.0), key_padding_mask=padding)
    close(layer.prior.prior, pooled(layer, gamma, ~padding[:, None, None]))


@pytest.mark.parametrize("batch_first", [False, True])
def test_padding_in_torch_encoder_layer(batch_first):
    """Test the floating-point masks that torch makes of bool ones, and both layouts."""
    outer = torch.nn.TransformerEncoderLayer(EMBED, H, 8, dropout=0.0, batch_first=batch_first, dtype=F64)
    inner = MultiheadAttention(EMBED, H, variant="mgk-em", batch_first=batch_first, dtype=F64)
    outer.self_attn = inner
    prior, x, padding = inner.attention.prior, randn(1, 4, EMBED), torch.arange(9)[None] >= 4
    start, actual = prior.prior.clone(), []
    for tokens, masks in ((x, {}), (torch.cat([x, randn(1, 5, EMBED)], 1), {"src_key_padding_mask": padding})):
        prior.prior.copy_(start)
        outer(tokens if batch_first else tokens.transpose(0, 1), **masks)
        actual.append(prior.prior.clone())
    close(*actual)
    assert not torch.equal(actual[0], start)


def test_fully_masked_batch_changes_nothing():
    layer, x = make(), randn(B, L, EMBED)
    start = layer.prior.prior.clone()
    layer(x, key_padding_mask=torch.ones(B, L, dtype=torch.bool))
    assert torch.equal(layer.prior.prior, start)
    layer(x[:, :0])
    assert torch.equal(layer.prior.prior, start)


def test_cross_attention():
    layer, x, memory = make(max_positions=12), randn(B, L, EMBED), randn(B, 12, EMBED)
    gamma = gammas(layer, x, memory)
    layer(x, memory)
    count, pairs = counts(layer, gamma)
    close(layer.prior.prior, count / pairs)


CU = torch.tensor([0, 5, 6, 14], dtype=torch.int32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("max_positions", [None, 10])
def test_packed_sequences_equal_padded_sequences(max_positions, causal):
    layer, x = make(max_positions=max_positions, is_causal=causal), randn(1, 14, EMBED)
    padded = copy.deepcopy(layer)
    start = layer.prior.prior.clone()
    layer(x, cu_seqlens=CU)
    actual = layer.prior.prior.clone()
    # Sum over the sequences, one at a time.
    count, pairs = 0.0, 0.0
    for piece in x.split((5, 1, 8), 1):
        size = piece.shape[1]
        gamma = gammas(layer, piece, log_prior=start.log()[..., :size])
        one = counts(layer, gamma, oracle.allowed(size, size, "top-left" if causal else None))
        one = [
            x.sum(-1, keepdim=True) if max_positions is None else torch.nn.functional.pad(x, (0, 10 - size))
            for x in one
        ]
        count, pairs = count + one[0], pairs + one[1]
    close(actual, torch.where(pairs > 0, count / pairs.clamp(min=1), start))
    rows = torch.nn.utils.rnn.pad_sequence(x[0].split((5, 1, 8)), batch_first=True, padding_value=7.0)
    padded(rows, key_padding_mask=torch.arange(8) >= CU.diff()[:, None])
    close(padded.prior.prior, actual)


def test_explicit_position_ids():
    layer, x = make(max_positions=20), randn(B, 4, EMBED)
    ids = torch.tensor([[0, 1, 2, 3], [7, 8, 2, 3], [16, 17, 18, 19]])
    start = layer.prior.prior.clone()
    layer(x, position_ids=ids)
    visible = ids.unique()
    changed = (layer.prior.prior != start).any(1).any(0)
    assert changed.nonzero().flatten().tolist() == visible.tolist()


def test_momentum_averages_over_batches():
    plain, slow = make(), make(Variant("gaussian", "independent", "em", em_momentum=0.7))
    slow.load_state_dict(plain.state_dict())
    start, x = plain.prior.prior.clone(), randn(B, L, EMBED)
    plain(x)
    slow(x)
    close(slow.prior.prior, 0.7 * start + 0.3 * plain.prior.prior)


CONVERSIONS = {
    "constructor": lambda layer, variant: make(variant, dtype=torch.bfloat16),
    "to": lambda layer, variant: layer.to(torch.bfloat16),
    "half": lambda layer, variant: layer.half(),
    "parent": lambda layer, variant: torch.nn.Sequential(layer).bfloat16()[0],
    "copy": lambda layer, variant: copy.deepcopy(layer.bfloat16()),
}
SLOW_VARIANCE = Variant("gaussian", "independent", "em", variance="em", em_momentum=0.999)


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_small_updates_in_half_precision(convert):
    """Compare with a layer of the same weights in fp32: the state has its precision, not that of the weights."""
    layer = convert(make(SLOW_VARIANCE, dtype=torch.float32), SLOW_VARIANCE)
    dtype = layer.query.weight.dtype
    reference = make(SLOW_VARIANCE, dtype=torch.float32)
    reference.load_state_dict(layer.state_dict())
    for _ in range(50):
        x = randn(B, L, EMBED).to(dtype)
        layer(x)
        reference(x.float())
    assert dtype in (torch.float16, torch.bfloat16)
    end = em_state(layer)
    assert {tensor.dtype for tensor in end.values()} == {torch.float32}
    assert (end["variance.log_variance"] - 0.5 * math.log(D)).abs().max() > 1e-3
    torch.testing.assert_close(end["prior.prior"].sum(1), torch.ones(H, 1), atol=1e-5, rtol=0)
    for name, tensor in em_state(reference).items():
        torch.testing.assert_close(end[name], tensor, atol=2e-4, rtol=0)


def test_conversions_do_not_round_the_state():
    layer = make(VARIANCE, dtype=torch.float32)
    expected = em_state(layer)
    assert same(em_state(layer.half().bfloat16().float()), expected)
    assert {tensor.dtype for tensor in em_state(layer.double()).values()} == {F64}
    assert same(em_state(layer.half()), expected)
    empty = Attention(EMBED, H, variant=VARIANCE, device="meta").bfloat16().to_empty(device="cpu")
    assert {tensor.dtype for tensor in em_state(empty).values()} == {torch.float32}


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_of_half_precision_loads(assign):
    layer, other = (make(VARIANCE, dtype=torch.bfloat16) for _ in range(2))
    former = {name: tensor.bfloat16() for name, tensor in layer.state_dict().items()}
    other.load_state_dict(former, assign=assign)
    assert other.query.weight.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in em_state(other).values()} == {torch.float32}
    assert all(torch.equal(tensor, former[name].float()) for name, tensor in em_state(other).items())
    other(randn(B, L, EMBED).bfloat16())


def em_state(layer):
    return {name: tensor.clone() for name, tensor in layer.named_buffers()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("variant", ["mgk-em", VARIANCE], ids=["prior", "variance"])
def test_no_update_in_eval_or_under_no_grad(variant):
    layer, x = make(variant), randn(B, L, EMBED)
    start = em_state(layer)
    layer.eval()(x)
    layer.train()
    with torch.no_grad():
        layer(x)
    with torch.inference_mode():
        layer(x)
    assert same(em_state(layer), start)
    layer(x)
    assert not same(em_state(layer), start)


@pytest.mark.parametrize("similarity", ["gaussian", "between"])
def test_variance_follows_equation_13(similarity):
    """Pool over positions, with fixed keys and the normalizer in the responsibilities."""
    layer, x = (
        make(Variant(similarity, "independent", "em", variance="em"), is_causal=True, num_kv_heads=HK),
        randn(B, L, EMBED),
    )
    layer.variance.log_variance.copy_(randn(HK, M))
    old = layer.variance.log_variance.exp()
    log_prior = layer.prior.prior.log() - (D / 2 * old.log())[..., None]
    gamma, visible = gammas(layer, x, log_prior=log_prior, scale=1 / old), oracle.allowed(L, L, "top-left")
    layer(x)
    close(layer.prior.prior, pooled(layer, gamma, visible))
    q, keys = split(layer.query(x), H), layer.keys(x).repeat_interleave(H // HK, 1)
    distance = (q[:, :, None, :, None] - keys[:, :, :, None]).square().sum(-1)
    spread, count = ((gamma * visible * weight).sum((0, 3, 4)) for weight in (distance, 1.0))
    spread, count = (t.unflatten(0, (HK, -1)).sum(1) for t in (spread, count))
    close(layer.variance.log_variance.exp(), spread / count / D)


def known_mixture(total=4000, width=4, momentum=0.0, floor=1e-4):
    """Return a layer with one key of two components at known means, and queries drawn from them."""
    variant = Variant("gaussian", "independent", "em", variance="em", em_momentum=momentum, variance_floor=floor)
    layer = Attention(width, 1, variant=variant, bias=True, dtype=F64)
    means = torch.stack([torch.full((width,), -1.0, dtype=F64), torch.full((width,), 1.0, dtype=F64)])
    with torch.no_grad():
        layer.query.weight.copy_(torch.eye(width))
        layer.query.bias.zero_()
        layer.keys.projection.weight.zero_()
        layer.keys.projection.bias.copy_(means.flatten())
    component = (torch.rand(total) < 0.3).long()
    variance = torch.tensor([0.25, 1.44], dtype=F64)
    draws = means[component] + variance[component].sqrt()[:, None] * randn(total, width)
    return layer, draws[None], torch.zeros(1, 1, width, dtype=F64)


def test_em_recovers_a_known_prior_and_variance():
    layer, queries, key = known_mixture()
    for _ in range(60):
        layer(queries, key)
    torch.testing.assert_close(
        layer.variance.log_variance.exp()[0], torch.tensor([0.25, 1.44], dtype=F64), rtol=0.08, atol=0
    )
    torch.testing.assert_close(layer.prior.prior[0, :, 0], torch.tensor([0.7, 0.3], dtype=F64), rtol=0, atol=0.03)
    before = em_state(layer)
    layer(queries, key)
    assert all((tensor - before[name]).abs().max() < 1e-6 for name, tensor in layer.named_buffers())


def test_variance_floor_and_momentum():
    layer, queries, key = known_mixture(floor=0.5)
    for _ in range(20):
        layer(queries, key)
    assert torch.equal(layer.variance.log_variance[0, 0].exp(), torch.tensor(0.5, dtype=F64).log().exp())
    fast, slow = known_mixture()[0], known_mixture(momentum=0.9)[0]
    old = fast.variance.log_variance.exp()
    fast(queries, key)
    slow(queries, key)
    close(slow.variance.log_variance.exp(), 0.9 * old + 0.1 * fast.variance.log_variance.exp())


def test_component_without_responsibility_keeps_its_variance():
    layer, queries, key = known_mixture()
    layer.prior.prior.copy_(torch.tensor([[[1.0], [0.0]]]))
    start = layer.variance.log_variance[0, 1].clone()
    layer(queries, key)
    assert torch.equal(layer.variance.log_variance[0, 1], start)
    assert torch.equal(layer.prior.prior[0, :, 0], torch.tensor([1.0, 0.0], dtype=F64))
    assert not layer(queries, key).isnan().any()


def test_m_step_with_masked_pairs():
    """Check sums over the queries that attend to a key, and finite values of a key without queries."""
    query, keys = randn(2, H, L, D), randn(2, H, M, 6, D)
    visible = torch.arange(L)[:, None] >= torch.tensor([0, 1, 2, 3, 5, L])
    gamma = oracle.responsibilities(query, keys) * visible
    actual = equations.m_step(query, gamma.transpose(2, 3), floor=0.3)
    for b, h in ((0, 0), (1, 3)):
        means, variance = oracle.m_step(query[b, h], gamma[b, h, ..., :5])
        close(actual.means[b, h, :, :5], means)
        close(actual.variance[b, h, :, :5], variance.clamp(min=0.3))
    assert (actual.variance == 0.3).any()
    assert all(part.isfinite().all() for part in actual)
    close(actual.prior[..., :5], gamma.sum(3)[..., :5] / visible[:, :5].sum(0))


def test_em_by_the_equations_recovers_a_known_mixture():
    """Iterate Eq. 11 and 13 for one key, with the normalizer in log_prior."""
    _, queries, _ = known_mixture()
    query = queries[None]
    log_prior, scale = torch.full((1, 1, 2, 1), 0.5, dtype=F64).log(), torch.ones(1, 1, 2, 1, dtype=F64)
    keys = torch.tensor([-0.3, 0.2], dtype=F64)[None, None, :, None, None].expand(1, 1, 2, 1, 4)
    for _ in range(80):
        gamma = equations.responsibilities(query, keys, log_prior + 2 * scale.log(), scale=scale)
        step = equations.m_step(query, gamma)
        keys, log_prior, scale = step.means, step.prior.log(), 1 / step.variance
    close(step.variance.flatten(), torch.tensor([0.25, 1.44], dtype=F64), 0.1)
    close(step.prior.flatten(), torch.tensor([0.7, 0.3], dtype=F64), 0.05)
    close(keys[0, 0, :, 0], torch.tensor([[-1.0] * 4, [1.0] * 4], dtype=F64), 0.1)


PARALLEL = [("mgk-em", {}), ("smgk-em", {"max_positions": L, "is_causal": True}), (VARIANCE, {})]


def parallel_batch():
    torch.manual_seed(3)
    return randn(4, L, EMBED), torch.arange(L).expand(4, -1) >= torch.tensor([[L], [4], [1], [6]])


def parallel_states(rows):
    """Return the EM buffers of layers after two batches, of which this rank has some rows."""
    states = []
    x, padding = parallel_batch()
    for variant, options in PARALLEL:
        torch.manual_seed(0)
        layer = make(variant, **options)
        for scale in (1.0, 2.0):
            layer(scale * x[rows], key_padding_mask=padding[rows])
        states.append(em_state(layer))
    return states


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.save(parallel_states(slice(0, 1) if rank == 0 else slice(1, 4)), f"{folder}/{rank}.pt")
    dist.barrier()  # torch 2.6 may hang if a thread of gloo still holds a tensor
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_equal_one_process(tmp_path):
    """Split a batch unevenly, with uneven padding: prior and variance equal those of one process."""
    mp.spawn(worker, args=(str(tmp_path),), nprocs=2)
    expected = parallel_states(slice(0, 4))
    for rank in range(2):
        for actual, one in zip(torch.load(tmp_path / f"{rank}.pt", weights_only=True), expected, strict=True):
            close(actual, one, 1e-12)
