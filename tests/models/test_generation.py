"""Decoding steps agree with decoding by growing caches, captured or not."""

import pytest
import torch

import mgk
from mgk.cache import DevicePosition
from mgk.models import DecoderConfig, LanguageModel
from mgk.models.decoder import FORMS
from mgk.models.generation import DecodingStep, Sampling, generate

V, MAX_LENGTH = 30, 12
FORM = {"paper": {}, "modern": FORMS["modern"], "ref-lm": {"preset": "ref-lm"}, "gqa": {"num_kv_heads": 2}}


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def tiny(variant, device="cpu", dtype=torch.float64, **options):
    options = {"embed_dim": 8, "ffn_dim": 16, "num_layers": 2, "num_heads": 4, "head_dim": 4, **options}
    model = LanguageModel(DecoderConfig(V, MAX_LENGTH, variant=variant, cutoffs=(10, 20), **options)).eval()
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    for layer in model.layers:
        prior = getattr(layer.attention.prior, "prior", None)
        if prior is not None:
            prior.copy_(torch.rand_like(prior).softmax(1))
    return model.to(device, dtype)


def scores(model, tokens, caches):
    return model.table.logits(model.hidden(tokens, caches=caches)[:, -1])


def compare_with_cache(model, batch=2, close=torch.testing.assert_close):
    """Decode after a prompt; then with the same caches after another prompt, and twice without one."""
    device = model.table.weight.device
    text = torch.randint(V, (batch, MAX_LENGTH), device=device)
    reference, stepped = (model.make_caches(batch, MAX_LENGTH) for _ in range(2))
    step = DecodingStep(model, stepped)
    for start, stop in ((4, MAX_LENGTH), (6, 9), (0, 3), (0, 3)):
        for caches in (reference, stepped) if start else ():
            scores(model, text[:, :start], caches)
        for n in range(start, stop):
            close(step(text[:, n : n + 1]), scores(model, text[:, n : n + 1], reference))
            assert stepped[-1].length == reference[-1].length == n + 1
        for cache in (*reference, *stepped):
            cache.reset()
    return step


@pytest.mark.parametrize("form", FORM)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_decoding_step_equals_growing_cache(variant, form):
    compare_with_cache(tiny(variant, **FORM[form]))


@pytest.mark.parametrize("variant", ["mgk", "smgk-em"])
def test_decoding_step_with_priors_per_position(variant):
    model = tiny(variant, preset="ref-lm")
    assert model.layers[0].attention.prior.positions == MAX_LENGTH
    compare_with_cache(model, batch=3)


@pytest.mark.parametrize("variant", ["softmax", "smgk-em", "mlk"])
def test_layer_reads_device_position(variant):
    layer = mgk.Attention(8, 2, variant=variant, rotary=30.0, max_positions=MAX_LENGTH, is_causal=True).eval().double()
    x = torch.randn(2, MAX_LENGTH, 8, dtype=torch.float64)
    cache, expected = layer.make_cache(2, MAX_LENGTH), layer(x)
    layer(x[:, :5], cache=cache)
    for n in range(5, MAX_LENGTH):
        cache.device_position = DevicePosition(torch.tensor([n]), torch.tensor([n + 1], dtype=torch.int32))
        torch.testing.assert_close(layer(x[:, n : n + 1], cache=cache), expected[:, n : n + 1])
    assert cache.length == 5


def test_decoding_step_keeps_buffers():
    """A capture requires that the buffers stay in place."""
    for variant in ("smgk", "mlk"):
        model = tiny(variant)
        caches = model.make_caches(1, MAX_LENGTH)
        scores(model, torch.zeros(1, 3, dtype=torch.long), caches)
        step, before = DecodingStep(model, caches), [part.data_ptr() for cache in caches for part in cache.buffers]
        for _ in range(4):
            step(torch.ones(1, 1, dtype=torch.long))
        assert [part.data_ptr() for cache in caches for part in cache.buffers] == before


class FakeGraph:
    """Stand-in for a captured graph on the CPU: it uses the buffers that existed at the capture."""

    def __init__(self, step):
        self.step, self.tokens = step, step._tokens

    def replay(self):
        assert self.step._tokens is self.tokens
        for cache, buffers in zip(self.step.caches, self.step._buffers, strict=True):
            assert all(a is b for a, b in zip(cache.buffers, buffers, strict=True))
        self.step._logits.copy_(self.step._step())


@pytest.fixture
def graphs_on_cpu(monkeypatch):
    def capture(self):
        captures.append(self)
        scores = self._step()
        self._buffers, self._logits = [tuple(cache.buffers) for cache in self.caches], scores.clone()
        self._graph = FakeGraph(self)
        return scores

    captures = []
    monkeypatch.setattr(DecodingStep, "_capture", capture)
    monkeypatch.setattr(DecodingStep, "use_graph", property(lambda _: True, lambda *_: None), raising=False)
    return captures


@pytest.mark.parametrize("variant", ["softmax", "mgk-em", "mlk"])
def test_replay_uses_captured_buffers(variant, graphs_on_cpu):
    compare_with_cache(tiny(variant, preset="ref-lm"))
    assert len(graphs_on_cpu) == 1


@pytest.mark.parametrize("variant", ["smgk", "mlk"])
def test_changed_cache_is_captured_again(variant, graphs_on_cpu):
    model = tiny(variant)
    reference, stepped = (model.make_caches(2, 4) for _ in range(2))
    step = DecodingStep(model, stepped)
    for change in (lambda _: None, lambda cache: cache.enlarge(8), lambda cache: cache.take(torch.tensor([1, 0, 1]))):
        for cache in (*reference, *stepped):
            change(cache)
        token = torch.randint(V, (reference[0].batch_size, 1))
        for _ in range(2):
            torch.testing.assert_close(step(token), scores(model, token, reference))
    assert len(graphs_on_cpu) == (3 if variant == "smgk" else 2)  # the size of a state does not depend on the length


@pytest.mark.parametrize("variant", ["smgk", "mlk"])
def test_cache_returns_to_captured_buffers(variant):
    model, prompt = tiny(variant), torch.randint(V, (2, 5))
    caches, reference_caches = (model.make_caches(2, MAX_LENGTH) for _ in range(2))
    for filled in (caches, reference_caches):
        scores(model, prompt, filled)
    buffers = [tuple(cache.buffers) for cache in caches]
    for cache in caches:
        cache.reset()
    scores(model, prompt, caches)
    assert all(cache.use_buffers(captured_buffers) for cache, captured_buffers in zip(caches, buffers, strict=True))
    assert all(
        a is b
        for cache, captured_buffers in zip(caches, buffers, strict=True)
        for a, b in zip(cache.buffers, captured_buffers, strict=True)
    )
    token = prompt[:, :1]
    torch.testing.assert_close(scores(model, token, caches), scores(model, token, reference_caches))
    caches[0].take(torch.tensor([1, 0, 1]))
    assert not caches[0].use_buffers(buffers[0])


def test_invalid_caches_raise():
    model = tiny("smgk")
    caches = model.make_caches(2, 8)
    for wrong in ([], None, caches[0], caches[:1], [None, None]):
        with pytest.raises(
            ValueError, match=r"caches must be a list of 2, one for each layer, from model\.make_caches"
        ):
            DecodingStep(model, wrong)
    with pytest.raises(ValueError, match="model must be a LanguageModel, got Linear"):
        DecodingStep(torch.nn.Linear(2, 2), caches)
    step, token = DecodingStep(model, caches), torch.zeros(2, 1, dtype=torch.long)
    step(token)
    step(token)
    caches[1].crop(1)
    with pytest.raises(ValueError, match=r"caches must hold the same tokens .* got lengths \[2, 1\]"):
        step(token)
    assert [cache.length for cache in caches] == [2, 1]
    caches[0].crop(1)
    model.train()
    with pytest.raises(ValueError, match="model must be in eval mode"):
        step(token)


def test_failed_step_rolls_caches_back():
    model = tiny("smgk")
    caches = [layer.attention.make_cache(2, max_length) for layer, max_length in zip(model.layers, (4, 3), strict=True)]
    step, token = DecodingStep(model, caches), torch.zeros(2, 1, dtype=torch.long)
    for wrong in (token[:1], token.expand(2, 2), [[0], [0]]):
        with pytest.raises(ValueError, match=r"tokens must be an integer tensor \[B, 1\] = \[2, 1\]"):
            step(wrong)
    with pytest.raises(ValueError, match="tokens must be an integer tensor"):
        step(token.float())
    assert [cache.length for cache in caches] == [0, 0]
    for _ in range(3):
        step(token)
    with pytest.raises(ValueError, match="cache holds 3 of at most 3 tokens: 1 more do not fit"):
        step(token)
    assert [cache.length for cache in caches] == [3, 3]
    padding = torch.zeros(2, 2, dtype=torch.bool)
    padding[0, 0] = True
    for cache in caches:
        cache.reset()
    model.hidden(token.expand(2, 2), caches=caches, key_padding_mask=padding)
    with pytest.raises(ValueError, match="key_padding_mask was given for earlier tokens"):
        step(token)


GPU = [("softmax", {}), ("softmax", {"num_kv_heads": 2}), ("smgk", {}), ("mgk", {}), ("linear", {}), ("mlk", {})]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant, options", [*GPU, ("mgk", {"preset": "ref-lm"}), ("smgk", FORMS["modern"])])
def test_captured_decoding_equals_eager(variant, options, dtype):
    model = tiny(variant, "cuda", dtype, head_dim=16, **options)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4

    def close(actual, expected):
        assert not actual.isnan().any()
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max()

    assert compare_with_cache(model, close=close).is_captured


@pytest.mark.gpu
def test_captured_generation_equals_eager(monkeypatch):
    model = tiny("smgk", "cuda", torch.float32)
    captured = list(generate(model, [1, 2, 3], max_tokens=3 * MAX_LENGTH, sampling=Sampling(temperature=0)))
    monkeypatch.setattr(DecodingStep, "__call__", lambda self, tokens: scores(self.model, tokens, self.caches))
    assert list(generate(model, [1, 2, 3], max_tokens=3 * MAX_LENGTH, sampling=Sampling(temperature=0))) == captured


def test_generation_in_training_mode_is_refused():
    with pytest.raises(ValueError, match=r"model must be in eval mode.*call model\.eval\(\)"):
        next(generate(tiny("smgk", "cpu", torch.float32).train(), [1, 2], max_tokens=1))
