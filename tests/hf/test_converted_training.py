"""Converted models under Trainer, Accelerate and quantization."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer  # noqa: E402
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

from mgk.hf import convert, load_converted  # noqa: E402
from tests.support.hf_models import inputs, logits, make, mixtures, randomize  # noqa: E402


def rows(count=8):
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 50, (count, 9))]


def arguments(folder, **settings):
    usual = {
        "per_device_train_batch_size": 4, "learning_rate": 1e-2, "report_to": [], "use_cpu": True,
        "save_strategy": "steps", "save_steps": 1, "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(folder), **{**usual, **settings})


def test_trainer_saves_checkpoints_that_load_and_resume(tmp_path):
    """Gradient checkpointing included; a resumed run ends with the weights of an uninterrupted one."""
    torch.manual_seed(0)
    original, data = make("llama"), rows()
    original.save_pretrained(tmp_path / "original")
    trained = []
    for steps, resume in ((2, False), (2, True)):
        torch.manual_seed(1)
        model = convert(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "original"))
        settings = arguments(tmp_path / "run", max_steps=steps, gradient_checkpointing=True)
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=data)
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1") if resume else None)
        trained.append(model.eval())
    assert all((mixture.tau != 0).all() for mixture in mixtures(trained[0]))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-2").eval()
    assert type(loaded) is type(trained[0])
    batch = inputs("left")
    for model in (trained[1], loaded):
        torch.testing.assert_close(logits(model, batch), logits(trained[0], batch))


def test_accelerate_trains_and_saves(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, batch = randomize(convert(make("llama"))), inputs()
    model.save_pretrained(tmp_path)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    accelerator.backward(prepared(**batch, labels=batch["input_ids"]).loss)
    optimizer.step()
    accelerator.unwrap_model(prepared).save_pretrained(
        tmp_path / "tuned", state_dict=accelerator.get_state_dict(prepared), save_function=accelerator.save
    )
    loaded = load_converted(tmp_path / "tuned").eval()
    assert torch.equal(logits(loaded, batch), logits(model.eval(), batch))
    with accelerate.init_empty_weights():
        empty = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    # Layers on disk are loaded when they run.
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu"}
    device_map |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    offloaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "tuned", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    torch.testing.assert_close(logits(offloaded.eval(), batch), logits(loaded, batch))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, .* are deprecated")
@pytest.mark.parametrize("order", ["convert, quantize", "quantize, convert"])
def test_dynamic_quantization(order):
    """Projections have int8 weights; the mixture keys keep their dtype."""
    model, batch = make("bert"), inputs("right")

    def quantize(module):
        return torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)

    if order == "convert, quantize":
        expected = logits(randomize(convert(model)), batch)
        model = quantize(model)
    else:
        model = randomize(convert(quantize(model)))
        expected = None
    attention = model.bert.encoder.layer[0].attention.self
    assert attention.key.weight().dtype == torch.qint8
    assert attention.mgk.tau.dtype == torch.float32
    actual = logits(model, batch)
    assert actual.isfinite().all()
    if expected is not None:
        assert (actual - expected).norm() < 0.2 * expected.norm()


class Int8Linear(nn.Module):
    """Linear layer with int8 weights and a scale for each output."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("weight", torch.empty_like(linear.weight, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(len(linear.weight), 1))

    def forward(self, x):
        return x @ (self.weight * self.scale).mT


class Int8Config(QuantizationConfigMixin):
    def __init__(self, **kwargs):
        self.quant_method = "int8-test"


class Int8Quantizer(HfQuantizer):
    def validate_environment(self, *args, **kwargs):
        pass

    def _process_model_before_weight_loading(self, model, **kwargs):
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(layer.self_attn, name, Int8Linear(getattr(layer.self_attn, name)))

    def is_serializable(self, *args, **kwargs):
        return True

    @property
    def is_trainable(self):
        return False


@pytest.fixture
def int8():
    register_quantization_config("int8-test")(Int8Config)
    register_quantizer("int8-test")(Int8Quantizer)
    yield
    for mapping in (AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING):
        del mapping["int8-test"]


def test_quantization_config_is_applied(int8, tmp_path):
    """The quantizer replaces projections of the converted model before its weights load."""
    model, batch = randomize(convert(make("llama"))), inputs("left")
    expected = logits(model, batch)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = getattr(layer.self_attn, name).weight.data
            module = Int8Linear(getattr(layer.self_attn, name))
            module.scale = weight.abs().amax(1, keepdim=True) / 127
            module.weight = (weight / module.scale).round().to(torch.int8)
            setattr(layer.self_attn, name, module)
    model.save_pretrained(tmp_path)
    for loaded in (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=Int8Config()),
        load_converted(tmp_path, quantization_config=Int8Config()),
    ):
        assert isinstance(loaded.model.layers[1].self_attn.k_proj, Int8Linear)
        assert loaded.model.layers[1].self_attn.k_proj.weight.dtype == torch.int8
        assert torch.equal(logits(loaded.eval(), batch), logits(model, batch))
        assert (logits(loaded, batch) - expected).norm() < 0.1 * expected.norm()
