"""Distillation of merged models: it reduces the loss, continues exactly, and rejects foreign states."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from mgk.hf import upcycle  # noqa: E402
from mgk.hf.upcycling import distil  # noqa: E402
from tests.support.hf_models import assert_close, inputs, logits, make  # noqa: E402

SETTINGS = {"num_key_heads": 2, "num_value_heads": 2, "distil_steps": 8, "learning_rate": 3e-3}


class Interrupted(Exception):
    pass


def interrupt(stage, done, total):
    if (stage, done) == ("distilling", 5):
        raise Interrupted


@pytest.fixture(params=["bert", "gpt2"])
def model(request):
    return make(request.param)


@pytest.fixture
def batches():
    return [inputs("right") for _ in range(12)]


@pytest.mark.parametrize("mixture", [False, True])
def test_distillation_reduces_the_error(model, batches, mixture):
    settings = {**SETTINGS, "distil_steps": 40, "method": "mean"}
    _, report = upcycle(model, **settings, calibration=batches, mixture=mixture)
    first, last = report.distillation[0], report.distillation[-1]
    assert last["hidden"] + last["output"] < 0.7 * (first["hidden"] + first["output"])
    assert (first["step"], last["step"]) == (0, 39)
    assert report.fidelity["distilled"]["hidden_error"] < report.fidelity["merged"]["hidden_error"]


def test_trained_parameters(model, batches):
    """Check that attention and normalization layers alone change, or everything."""
    before, _ = upcycle(model, **{**SETTINGS, "distil_steps": 0}, calibration=batches)
    after, _ = upcycle(model, **SETTINGS, calibration=batches)
    everything, _ = upcycle(model, **SETTINGS, calibration=batches, trainable="all")
    names = {name for name, value in before.named_parameters() if not torch.equal(value, after.get_parameter(name))}
    assert names
    allowed = ("attn", "attention", "ln_", "LayerNorm")
    assert all(any(part in name for part in allowed) for name in names)
    assert any("c_proj.weight" in name or "output.dense.weight" in name for name in names)
    embedding = next(name for name, _ in before.named_parameters() if "word_embeddings" in name or "wte" in name)
    assert embedding not in names
    assert not torch.equal(before.get_parameter(embedding), everything.get_parameter(embedding))
    assert all(parameter.requires_grad for parameter in after.parameters())


def test_interrupted_distillation_continues_exactly(model, batches, tmp_path, monkeypatch):
    monkeypatch.setattr(distil, "SAVE_EVERY", 2)
    expected, report = upcycle(model, **SETTINGS, calibration=batches)
    state = tmp_path / "state"
    with pytest.raises(Interrupted):
        upcycle(model, **SETTINGS, calibration=batches, state=state, progress=interrupt)
    assert [path.name for path in state.iterdir()] == ["distillation.safetensors"]
    steps = []
    actual, resumed = upcycle(
        model, **SETTINGS, calibration=batches, state=state, progress=lambda stage, *done: steps.append((stage, *done))
    )
    assert next(step for step in steps if step[0] == "distilling") == ("distilling", 5, 8)
    assert all(torch.equal(value, actual.get_parameter(name)) for name, value in expected.named_parameters())
    assert resumed.distillation == report.distillation
    with pytest.raises(ValueError, match="holds the distillation of another model, text or settings: delete the"):
        upcycle(model, **{**SETTINGS, "seed": 1}, calibration=batches, state=state)
    (state / "distillation.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="has a damaged state of the distillation: delete the folder"):
        upcycle(model, **SETTINGS, calibration=batches, state=state)


def test_adapters_on_merged_heads(batches, tmp_path):
    """Train LoRA on a merged model, save, load and merge it."""
    peft = pytest.importorskip("peft")
    merged, _ = upcycle(make("llama", num_key_value_heads=4), num_key_heads=1, num_value_heads=2, calibration=batches)
    merged.save_pretrained(tmp_path / "model")
    batch = inputs("right")
    before = logits(merged, batch)
    adapted = peft.get_peft_model(merged, peft.LoraConfig(target_modules=["k_proj", "v_proj"], r=2))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted(**batch, labels=batch["input_ids"]).loss.backward()
    assert any(parameter.grad is not None for name, parameter in adapted.named_parameters() if "lora_A" in name)
    expected = logits(adapted, batch)
    assert (expected - before).abs().max() > 0.1
    adapted.save_pretrained(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert_close(logits(loaded, batch), expected)
    assert_close(logits(loaded.merge_and_unload(), batch), expected)


def test_gradient_checkpointing_has_the_same_gradients(model, batches):
    merged, _ = upcycle(model, num_key_heads=1, num_value_heads=2, calibration=batches)
    gradients = []
    for is_enabled in (False, True):
        if is_enabled:
            merged.gradient_checkpointing_enable()
        merged.zero_grad()
        # Gradient checkpointing is active in training mode alone; dropout is off.
        merged.train()
        for module in merged.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        merged(**batches[0], labels=batches[0]["input_ids"]).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in merged.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_models_in_half_precision_are_trained_in_fp32(model, batches, dtype):
    """AdamW in fp16 divides by a second moment that underflows."""
    settings = {**SETTINGS, "distil_steps": 40, "method": "mean"}
    merged, report = upcycle(model.to(dtype), **settings, calibration=batches)
    assert {parameter.dtype for parameter in merged.parameters()} == {dtype}
    assert all(bool(parameter.isfinite().all()) for parameter in merged.parameters())
    assert report.fidelity["distilled"]["hidden_error"] < report.fidelity["merged"]["hidden_error"]


def test_a_loss_that_is_not_finite_ends_the_training(model, batches):
    with pytest.raises(ValueError, match="learning_rate = 1e\\+30 is too large: the loss is not finite at step"):
        upcycle(model, **{**SETTINGS, "learning_rate": 1e30}, calibration=batches)


def test_state_of_another_model_of_the_same_shape_is_refused(model, batches, tmp_path, monkeypatch):
    monkeypatch.setattr(distil, "SAVE_EVERY", 2)
    with pytest.raises(Interrupted):
        upcycle(model, **SETTINGS, calibration=batches, state=tmp_path, progress=interrupt)
    with torch.no_grad():
        next(model.parameters()).add_(0.01)
    with pytest.raises(ValueError, match="holds the distillation of another model"):
        upcycle(model, **SETTINGS, calibration=batches, state=tmp_path)
