"""VisionTransformer: patches, inputs, files, training and analysis."""

import dataclasses

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mgk import tasks
from mgk.cli import commands
from mgk.models import VisionConfig, VisionTransformer, load_model, save_model
from mgk.tasks.base import write_split
from mgk.tasks.image import ImagePatches
from mgk.variants import VARIANTS

SMALL = VisionConfig(3, image_size=8, channels=2, patch_size=4, embed_dim=16, ffn_dim=16, num_layers=2, num_heads=2,
                     head_dim=8, dropout=0.0)  # fmt: skip


def model_of(**changes):
    torch.manual_seed(0)
    model = VisionTransformer(dataclasses.replace(SMALL, **changes)).eval()
    torch.nn.init.normal_(model.head.weight)
    return model


def test_patches_are_squares_in_reading_order():
    model = model_of()
    images = torch.rand(1, 2, 8, 8)
    embedded = []
    model.patches.register_forward_pre_hook(lambda module, args: embedded.append(args[0]))
    model(images)
    rows = [
        torch.stack([images[0, c, 4 * row + y, 4 * column + x] for c in range(2) for y in range(4) for x in range(4)])
        for row in range(2)
        for column in range(2)
    ]
    torch.testing.assert_close(embedded[0][0], 2 * torch.stack(rows) - 1)


def test_uint8_images_are_scaled_to_0_1():
    model, images = model_of(), torch.randint(0, 256, (3, 2, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(model(images), model(images.float() / 255))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains(variant):
    model = model_of(variant=variant).train()
    model(torch.rand(2, 2, 8, 8)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name


def test_save_and_load(tmp_path):
    model = model_of(variant=("smgk", "softmax"))
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    images = torch.rand(2, 2, 8, 8)
    assert torch.equal(loaded(images), model(images))


def test_wrong_images_and_settings():
    model = model_of()
    for images in (torch.rand(2, 2, 8, 7), torch.rand(2, 8, 8), torch.rand(2, 1, 8, 8)):
        with pytest.raises(ValueError, match=r"images must have shape \[B, 2, 8, 8\]"):
            model(images)
    with pytest.raises(ValueError, match="images must be uint8 or floating point"):
        model(torch.zeros(2, 2, 8, 8, dtype=torch.long))
    for changes, message in (
        ({"patch_size": 3}, "patch_size = 3 must divide image_size = 8"),
        ({"num_layers": 0}, "num_layers"),
        ({"variant": "x"}, "variant must be one of"),
        ({"preset": "x"}, "preset"),
        ({"dropout": 2.0}, "dropout"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(SMALL, **changes)


@dataclasses.dataclass(frozen=True)
class Drawn(ImagePatches):
    """Dark and bright pictures."""

    def files(self, data_dir):
        return []

    def build(self, data_dir, folder, workers, progress):
        for seed, (name, count) in enumerate((("train", 64), ("dev", 16), ("test", 32))):
            generator = np.random.default_rng(seed)
            pictures = generator.integers(0, 100, (count, 32, 32), dtype=np.uint8)
            labels = generator.integers(0, 2, count)
            pictures += (150 * labels[:, None, None]).astype(np.uint8)
            write_split(folder, name, (((p.reshape(-1),), int(n)) for p, n in zip(pictures, labels, strict=True)))
        return {"examples": {"train": 64, "dev": 16, "test": 32}}


def invoke(*arguments):
    return CliRunner().invoke(commands.app, [str(argument) for argument in arguments])


def test_train_evaluate_and_analyze(tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "image-patches", Drawn(num_classes=2))
    out, report = tmp_path / "run", tmp_path / "report"
    options = "warmup=2 batch_size=16 eval_every=15 eval_batch_size=16 lr=0.01 precision=fp32 compile=false"
    options += " model.num_layers=1 model.embed_dim=16 model.ffn_dim=16 model.head_dim=8 model.patch_size=8"
    settings = [part for option in options.split() for part in ("--set", option)]
    arguments = ["--data-dir", tmp_path, "--out", out, "--variant", "smgk", "--heads", "2", "--steps", "30", *settings]
    trained = invoke("train", "image-patches", *arguments)
    assert "test accuracy 100.00 %" in trained.output, trained.output
    assert '"accuracy": 1.0' in invoke("eval", out).output
    analyzed = invoke("analyze", out, "--out", report, "--removal", "4", "--matrices", "4")
    assert analyzed.exception is None, analyzed.output
    assert "images of" in (report / "report.html").read_text(encoding="utf-8")
    refused = invoke("analyze", out, "--out", tmp_path / "other", "--length", "8")
    assert "--length is not supported for images" in str(refused.exception)
