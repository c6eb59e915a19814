"""Model types of converted models: the Auto classes, pipelines and pickle give the same model."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

import mgk.hf  # noqa: E402
import mgk.hf.registration as registration  # noqa: E402
from mgk.hf import convert, load_converted  # noqa: E402
from tests.support.hf_models import SIZES, inputs, logits, make, mixtures, randomize, small  # noqa: E402

OLD_FOLDER = Path(__file__).parents[1] / "fixtures" / "aa005c7" / "hf-converted"
MIXTRAL = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
FALCON = {"num_key_value_heads": 2, "mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_d_state": 16}
# model type -> model, Auto class
CASES = {
    "mistral": (lambda: make("mistral"), "AutoModelForCausalLM"),
    "gpt2": (lambda: make("gpt2"), "AutoModelForCausalLM"),
    "bert": (lambda: make("bert"), "AutoModelForMaskedLM"),
    "bart": (lambda: make("bart"), "AutoModelForSeq2SeqLM"),
    # Its experts are saved under other names, one tensor for each.
    "mixtral": (lambda: small("MixtralForCausalLM", "MixtralConfig", **MIXTRAL), "AutoModelForCausalLM"),
    # It has buffers that are not saved.
    "falcon_h1": (lambda: small("FalconH1ForCausalLM", "FalconH1Config", **FALCON), "AutoModelForCausalLM"),
}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model"


def save_tokenizer(folder):
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<mask>": 3, **{f"w{n}": n for n in range(4, SIZES["vocab_size"])}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "mask_token": "<mask>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


@pytest.mark.parametrize("name", CASES)
def test_auto_class_loads_same_model(name, folder):
    build, auto = CASES[name]
    model, batch = build().eval(), inputs()
    # The weights were loaded from a file, as those of a pretrained model.
    model.save_pretrained(folder / "original")
    model = randomize(convert(type(model).from_pretrained(folder / "original").eval()))
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["model_type"] == model.config.model_type == f"mgk-{name}"
    assert saved["architectures"] == [type(model).__name__]
    loaded, info = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert type(loaded) is type(model)
    assert isinstance(loaded, registration.ChangedModel)
    assert torch.equal(logits(loaded.eval(), batch), logits(model, batch))
    assert loaded.config.to_dict() == {**model.config.to_dict(), "_name_or_path": str(folder)}
    base = transformers.AutoModel.from_pretrained(folder).eval()
    assert len(mixtures(base)) == len(mixtures(model))
    with torch.no_grad():
        assert torch.equal(base(**batch)[0], model.base_model(**batch)[0])
    copied = pickle.loads(pickle.dumps(loaded))
    assert torch.equal(logits(copied, batch), logits(model, batch))
    new = getattr(transformers, auto).from_config(transformers.AutoConfig.from_pretrained(folder))
    assert type(new) is type(model)
    assert all(mixture.tau.eq(0).all() and mixture.shift.std() > 0.1 for mixture in mixtures(new))


def test_readme_is_not_replaced(folder):
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    convert(make("llama")).save_pretrained(folder)
    assert (folder / "README.md").read_text() == "mine"


@pytest.mark.parametrize(("kind", "auto"), [("language-model", "AutoModelForCausalLM"), ("classifier", None)])
def test_readme_of_models_of_this_package(kind, auto, folder):
    sizes = {"vocab_size": 64, "max_position_embeddings": 20, "hidden_size": 32, "num_attention_heads": 2}
    config = mgk.hf.MGKConfig(kind=kind, num_labels=3, **sizes)
    auto = auto or "AutoModelForSequenceClassification"
    getattr(transformers, auto).from_config(config).save_pretrained(folder)
    readme = (folder / "README.md").read_text()
    assert "`mgk`" in readme
    assert f"model = {auto}.from_pretrained" in readme


def test_vision_model_and_classifier_head(folder):
    example = {"pixel_values": torch.randn(2, 3, 16, 16)}
    model = small("ViTModel", "ViTConfig", image_size=16, patch_size=8).eval()
    randomize(convert(model, example=example)).save_pretrained(folder)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(folder, num_labels=3).eval()
    assert isinstance(loaded, transformers.ViTForImageClassification)
    with torch.no_grad():
        hidden = model(**example).last_hidden_state
        torch.testing.assert_close(loaded.vit(**example).last_hidden_state, hidden)
        assert loaded(**example).logits.shape == (2, 3)


@pytest.mark.parametrize("task", ["text-generation", "fill-mask", "feature-extraction"])
def test_pipeline_runs_same_model(task, folder):
    model = randomize(convert(make("mistral" if task == "text-generation" else "bert")))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    run = transformers.pipeline(task, model=str(folder), tokenizer=str(folder))
    assert isinstance(run.model, registration.ChangedModel)
    text = "w5 w6 <mask> w8 w9"
    batch = run.tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        if task == "text-generation":
            tokens = model.generate(**batch, max_new_tokens=4, do_sample=False)[0].tolist()
            output = run(text, max_new_tokens=4, do_sample=False, return_tensors=True)
            assert output[0]["generated_token_ids"] == tokens
        elif task == "fill-mask":
            scores = model(**batch).logits[0, 2].softmax(-1)
            assert [row["token"] for row in run(text)] == scores.topk(5).indices.tolist()
        else:
            expected = model.base_model(**batch).last_hidden_state
            torch.testing.assert_close(torch.tensor(run(text)), expected)


SCRIPT = """
import sys
sys.modules["mgk"] = None
import torch, transformers
transformers.logging.set_verbosity_error()
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
except ValueError as error:
    print(str(error).split(". ")[0])
del sys.modules["mgk"]
import mgk.hf
transformers.utils.logging.disable_progress_bar()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
print(model(torch.arange(3, 9)[None]).logits.double().norm().item())
"""


def test_new_process_loads_same_model_only_with_mgk(folder):
    model = randomize(convert(make("llama")))
    model.save_pretrained(folder)
    root = str(Path(registration.__file__).parents[2])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    message, norm = done.stdout.splitlines()
    assert message.endswith("has model type `mgk-llama` but Transformers does not recognize this architecture")
    assert json.loads((folder / "config.json").read_text())["mgk"]["requires"].startswith("pip install mgk")
    readme = (folder / "README.md").read_text()
    assert "`mgk-llama`" in readme
    assert "pip install 'mgk[hf]'" in readme
    code = readme.partition("```python\n")[2].partition("```")[0].replace("FOLDER", str(folder))
    scope = {}
    exec(code, scope)
    assert type(scope["model"]) is type(model)
    with torch.no_grad():
        assert float(norm) == pytest.approx(model(torch.arange(3, 9)[None]).logits.double().norm().item(), rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bart"])
def test_original_class_raises(name, folder):
    """Transformers only warns about another model type, and would drop the mixture keys."""
    model = convert(make(name))
    model.save_pretrained(folder)
    auto = CASES["mistral" if name == "llama" else name][1]
    message = rf"attn_implementation=.mgk, which needs 'import mgk.hf' and {auto}.{{1,2}} is not supported"
    for original in (model.original_class, type(model.base_model)):
        with pytest.raises(ValueError, match=message):
            original.from_pretrained(folder)
    config = type(model.config).from_json_file(folder / "config.json")
    assert config._attn_implementation is None
    assert config.mgk == model.config.mgk
    loaded = getattr(transformers, auto).from_pretrained(folder, attn_implementation="eager")
    assert loaded.config._attn_implementation == "eager"


def test_arguments_of_from_pretrained(folder):
    model, batch = randomize(convert(make("llama"))), inputs("left")
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    arguments = {"dtype": torch.float16, "device_map": {"": "cpu"}, "attn_implementation": "eager", "revision": "main"}
    for loaded in (
        transformers.AutoModelForCausalLM.from_pretrained(folder, **arguments),
        load_converted(folder, **arguments),
    ):
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float16}
        assert {parameter.device.type for parameter in loaded.parameters()} == {"cpu"}
        assert loaded.config._attn_implementation == "eager"
        torch.testing.assert_close(logits(loaded.float(), batch), logits(model, batch), rtol=0.05, atol=0.05)
    loaded.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits(loaded, batch), logits(model, batch), rtol=0.05, atol=0.05)


def test_old_folder_is_saved_with_its_own_type(folder):
    model = load_converted(OLD_FOLDER).eval()
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "mgk-llama"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    batch = inputs()
    assert torch.equal(logits(loaded, batch), logits(model, batch))


def test_damaged_folder_raises(folder):
    convert(make("llama")).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    projection = "model.layers.1.self_attn.k_proj.weight"
    for broken in (
        {name: tensor for name, tensor in weights.items() if name != projection},
        {**weights, projection: torch.zeros(8, 32)},
        {name: tensor for name, tensor in weights.items() if not name.endswith("mgk.tau")},
    ):
        save_file(broken, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"has weights that do not match its config.json: .*self_attn"):
            transformers.AutoModelForCausalLM.from_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    saved["mgk"]["later"] = {}
    (folder / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"with mgk.later, which needs a newer version of mgk"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def narrow(model, settings):
    """Give layers one key head, as their entry in config.mgk tells."""
    for name, heads in settings["narrow"].items():
        layer = model.base_model.get_submodule(name)
        layer.num_key_value_groups = layer.config.num_attention_heads // heads
        layer.k_proj = nn.Linear(32, heads * 8, bias=False)
        layer.v_proj = nn.Linear(32, heads * 8, bias=False)


def test_registered_change_is_repeated_before_loading(folder, monkeypatch):
    """A change of shapes in one layer, with mixture keys in both."""
    monkeypatch.setattr(registration, "_builders", dict(registration._builders))
    registration.register_builder("narrow", narrow, first=True)
    model, batch = make("llama"), inputs("left")
    settings = {"narrow": {"layers.1.self_attn": 1}}
    narrow(model, settings)
    registration.describe_changes(model, **settings)
    randomize(convert(model))
    assert model.config.mgk["layers"] == {"layers.0.self_attn": [2, 2, 8], "layers.1.self_attn": [1, 2, 8]}
    model.save_pretrained(folder)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert loaded.model.layers[1].self_attn.k_proj.weight.shape == (8, 32)
    assert torch.equal(logits(loaded.eval(), batch), logits(model, batch))
    generate = {**batch, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(loaded.generate(**generate), model.generate(**generate))
