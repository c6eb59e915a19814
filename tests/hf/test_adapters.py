"""Adapters of PEFT on converted models train, save and merge the mixture keys."""

import copy
import json

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file  # noqa: E402

from mgk.hf import convert, upcycle  # noqa: E402
from mgk.hf.mixture_keys import MixtureKeys  # noqa: E402
from tests.support.hf_models import assert_close, inputs, logits, make, mixtures, randomize  # noqa: E402

# name -> settings of LoraConfig; default targets, all settings that name the mixture keys
SETTINGS = {
    "defaults": {},
    "all linear": {"target_modules": "all-linear"},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["mgk"]},
    "target_parameters": {"target_modules": ["q_proj"], "target_parameters": ["mgk.shift"]},
    "excluded": {"target_modules": ["q_proj"], "exclude_modules": ["mgk"]},
}


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    randomize(convert(make("llama"))).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def trainable(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def train(model, batch, steps=3):
    """Train the adapter; return the logits before and after."""
    before = logits(model, batch)
    optimizer = torch.optim.Adam(trainable(model).values(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
    return before, logits(model, batch)


@pytest.mark.parametrize("name", SETTINGS)
def test_adapter_trains_saves_and_merges(name, base, tmp_path):
    folder, merged_folder, batch = tmp_path / "adapter", tmp_path / "merged", inputs("left")
    config = peft.LoraConfig(task_type="CAUSAL_LM", **SETTINGS[name])
    model = peft.get_peft_model(copy.deepcopy(base), config)
    names = [key for key in trainable(model) if ".mgk." in key]
    assert len(names) == {"target_parameters": 4, "excluded": 0}.get(name, 6)
    assert all(parameter.requires_grad or "lora_" not in key for key, parameter in model.named_parameters())
    before, after = train(model, batch)
    assert (after - before).abs().max() > 0.1
    for parameter in trainable(model).values():
        assert parameter.grad.abs().max() > 0
    # Unmerged: PEFT's classes and Transformers' integration.
    model.save_pretrained(folder)
    saved = [key for key in load_file(folder / "adapter_model.safetensors") if ".mgk." in key]
    assert len(saved) == len(names)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
    assert not trainable(loaded)
    assert torch.equal(logits(loaded, batch), after)
    automatic = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(logits(automatic, batch), after)
    with automatic.disable_adapter():
        assert torch.equal(logits(automatic, batch), before)
    if transformers.__version__.startswith("5.17.") and config.modules_to_save:
        with pytest.raises(ValueError, match=r"Transformers 5.17.* does not load: use peft.PeftModel"):
            transformers.AutoModelForCausalLM.from_pretrained(folder)
    else:
        integrated = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        assert type(integrated) is type(base)
        assert torch.equal(logits(integrated, batch), after)
    # Merged.
    merged = automatic.merge_and_unload()
    assert type(merged) is type(base)
    assert all(type(layer.self_attn.mgk) is MixtureKeys for layer in merged.model.layers)
    merged.save_pretrained(merged_folder)
    again = transformers.AutoModelForCausalLM.from_pretrained(merged_folder).eval()
    for implementation in ("sdpa", "eager"):
        for result in (merged, again):
            result.set_attn_implementation(implementation)
            assert_close(logits(result, batch), after)


def test_adapter_that_continues_training(base, tmp_path):
    batch = inputs()
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(target_modules=["v_proj"]))
    train(model, batch)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == ["mgk"]
    resumed = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, is_trainable=True)
    assert trainable(resumed).keys() == trainable(model).keys()
    before, after = train(resumed, batch)
    assert (after - before).abs().max() > 0.01


@pytest.mark.parametrize("excluded", [["mgk"], r".*\.mgk\..*", r".*\bmgk\b.*"])
def test_excluded_mixture_keys_are_not_trained(base, excluded):
    config = peft.LoraConfig(target_modules=["v_proj"], exclude_modules=excluded)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    assert not [key for key in trainable(model) if ".mgk." in key]


def test_adapter_of_transformers(base):
    model, batch = copy.deepcopy(base), inputs()
    before = logits(model, batch)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    assert len([key for key in trainable(model) if ".mgk." in key]) == 6
    _, after = train(model, batch)
    model.disable_adapters()
    assert torch.equal(logits(model, batch), before)
    model.enable_adapters()
    assert torch.equal(logits(model, batch), after)
    generated = model.generate(**batch, max_new_tokens=3, do_sample=False)
    assert generated.shape == (2, 12)


def test_adapter_trained_before_the_conversion(tmp_path):
    """Adapters without mixture keys load for inference; their weights are not required."""
    original, batch = make("llama"), inputs()
    model = peft.get_peft_model(copy.deepcopy(original), peft.LoraConfig(target_modules=["q_proj"]))
    _, after = train(model, batch)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(convert(original), tmp_path).eval()
    assert len(mixtures(loaded)) == 2
    assert_close(logits(loaded, batch), after)


def test_model_with_adapters_is_not_converted():
    """The base model of an adapter would not have the mixture keys."""

    def wrapped():
        return peft.get_peft_model(make("llama"), peft.LoraConfig(target_modules=["q_proj"]))

    injected = make("llama")
    injected.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    for model in (wrapped(), injected):
        with pytest.raises(ValueError, match=r"model has adapters: convert and save it without them.*merge_and_unload"):
            convert(model)
        assert not mixtures(model)
        with pytest.raises(ValueError, match=r"model has adapters: upcycle and save it.* to the upcycled model"):
            upcycle(model, num_key_heads=1, calibration=[inputs()])
    assert len(mixtures(convert(wrapped().merge_and_unload()))) == 2
