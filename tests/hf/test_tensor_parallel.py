"""Converted and merged models under Transformers' tensor parallelism, over two processes."""

import os

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

import mgk.hf  # noqa: E402
from tests.support.hf_models import make, mixtures, randomize  # noqa: E402
from tests.support.workers import start_workers  # noqa: E402

TOKENS = torch.arange(3, 21).reshape(2, 9)


def measure(model):
    """Return logits, and the gradients of the mixture keys of all layers."""
    output = model(TOKENS, labels=TOKENS)
    output.loss.backward()
    gradients = {
        f"{number}.{name}": parameter.grad
        for number, mixture in enumerate(mixtures(model))
        for name, parameter in mixture.named_parameters()
    }
    return {"logits": output.logits.detach(), **gradients}


def compare(rank, ranks, folders):
    """Load each folder with half of the heads; return the largest relative errors and the local shapes of the keys."""
    from transformers.distributed import DistributedConfig

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    errors, shapes = {}, []
    for folder in folders:
        plan = DistributedConfig(tp_plan="auto", tp_size=ranks)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan).eval()
        shapes.append(list(model.model.layers[0].self_attn.k_proj.weight.to_local().shape))
        expected = load_file(f"{folder}/expected.safetensors")
        for name, actual in measure(model).items():
            error = (actual - expected[name]).abs().max() / expected[name].abs().max()
            errors[f"{folder}: {name}"] = float(error)
    return errors, shapes


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    pytest.importorskip("transformers.distributed")
    converted = randomize(mgk.hf.convert(make("llama")))
    batches = [{"input_ids": torch.randint(3, 50, (4, 20))} for _ in range(6)]
    merged, _ = mgk.hf.upcycle(
        make("llama", num_key_value_heads=4), num_key_heads=2, num_value_heads=4, calibration=batches
    )
    folders = []
    for name, model in (("converted", converted), ("merged", merged)):
        model.save_pretrained(tmp_path / name)
        save_file(measure(model.eval()), tmp_path / name / "expected.safetensors")
        folders.append(str(tmp_path / name))
    results = start_workers(compare, 2, tmp_path, folders)
    for result in results:
        assert "error" not in result, result["traceback"]
        errors, shapes = result["value"]
        assert len(errors) == 2 + 3 * len(mixtures(converted))
        assert max(errors.values()) < 1e-5, errors
        assert shapes == [[8, 32], [8, 32]]
