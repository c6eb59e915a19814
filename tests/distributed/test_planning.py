"""Formulas of the plan: compared with the volumes and the memory of small runs, and the table with the page."""

import functools
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from mgk._core.markdown import fill_marked_parts
from mgk.distributed import context_parallel, planning, shard, tensor_parallel
from mgk.distributed.planning import Layout, TrainingStep, count_parameters
from mgk.models import DecoderConfig, LanguageModel
from mgk.models.decoder import FORMS
from tests.support.communication import CommunicationVolume
from tests.support.launch_training import needs_fsdp
from tests.support.memory import PeakMemory
from tests.support.workers import run_workers

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
CONFIG = DecoderConfig(
    64, embed_dim=16, ffn_dim=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, dropout=0.0, backend="sdpa",
    **FORMS["modern"],
)  # fmt: skip
CONFIGS = {
    "smgk": CONFIG,
    "mgk": DecoderConfig(**{**vars(CONFIG), "variant": "mgk", "num_kv_heads": 4, "num_key_heads": 2}),
}
LENGTH = 256


def make(run):
    """Return the model and the tokens of a rank, sharded as in the plan."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    layout = run.layout
    torch.manual_seed(0)
    model = LanguageModel(run.config)
    mesh = init_device_mesh("cpu", (layout.dp, layout.cp, layout.tp), mesh_dim_names=("dp", "cp", "tp"))
    tokens = torch.randint(64, (run.sequences, run.length + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if layout.tp > 1:
        tensor_parallel(model, mesh["tp"])
    if layout.cp > 1:
        context_parallel(model, mesh["cp"])
        inputs, targets = shard(inputs, mesh["cp"]), shard(targets, mesh["cp"])
    if run.recompute:
        for layer in model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    if layout.dp > 1:
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh["dp"])
        register_fsdp_forward_method(model, "losses")
    return model, inputs, targets


def local(x):
    return x.to_local() if hasattr(x, "to_local") else x


def measure_volumes(run):
    """Return the bytes of all communication of a training step, by kind."""
    model, inputs, targets = make(run)
    with CommunicationVolume() as volume:
        model.losses(inputs, targets).mean().backward()
    return dict(volume.bytes)


def measure_memory(run):
    """Return the bytes that a layer saves, the peak of its forward and backward pass, and those of its parameters."""
    model, inputs, _ = make(run)
    layer = model.layers[0]
    x = model.embed(inputs).detach().requires_grad_()
    storages = {local(p).untyped_storage()._cdata for p in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = local(tensor).untyped_storage()
        if storage._cdata not in storages and local(tensor).numel() > 8 * CONFIG.head_dim:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(x)
    del output
    with PeakMemory() as memory:
        layer(x).sum().backward()
    return sum(saved.values()), memory.peak, sum(local(p).nbytes for p in model.parameters())


def runs():
    common = {"length": LENGTH, "sequences": 2, "compute_bytes": 4}
    for name, config in CONFIGS.items():
        for recompute in (False, True):
            for dims in ((1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 4, 1)):
                if name == "smgk" or dims[1] > 1:
                    yield TrainingStep(config, Layout(*dims), recompute=recompute, **common)


def work(rank, ranks):
    volumes = [measure_volumes(run) for run in runs()]
    memory = [measure_memory(run) for run in runs() if not run.recompute and run.layout.dp == 1]
    return volumes, memory


@needs_fsdp
@pytest.mark.slow
def test_formulas_equal_measurements(tmp_path):
    for volumes, memory in run_workers(work, 4, tmp_path):
        for run, measured in zip(runs(), volumes, strict=True):
            layout = run.layout
            # FSDP shards over the data-parallel ranks only in these runs.
            over_dp = TrainingStep(**{**vars(run), "layout": Layout(layout.dp, 1, layout.tp)})
            gathered, reduced = planning.fsdp_volumes(over_dp)
            assert measured.get("send", 0) == planning.ring_bytes(run), run
            assert measured.get("all_reduce", 0) == planning.tensor_parallel_volume(run), run
            assert measured.get("all_gather", 0) == pytest.approx(gathered, rel=0.01), run
            assert measured.get("reduce_scatter", 0) == pytest.approx(reduced, rel=0.01), run
        plain = [run for run in runs() if not run.recompute and run.layout.dp == 1]
        for run, (saved, peak, parameter_bytes) in zip(plain, memory, strict=True):
            assert parameter_bytes == 4 * count_parameters(run.config, run.layout.tp).total
            assert saved == pytest.approx(planning.saved_bytes(run), rel=0.02), run
            limit = 2 * planning.saved_bytes(run) + 4 * planning.key_value_bytes(run, 4)
            assert 0.5 * limit < peak < limit, run


def test_page_has_the_table_of_the_command(capsys):
    page = PAGE.read_text(encoding="utf-8")
    filled = fill_marked_parts(page, {"plan": planning.plan_table()}, keep_others=True)
    assert filled == page, "run python -m mgk.distributed.planning --page PAGE"
    planning.main(["--length", "4096", "--layouts", "1x2x2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| softmax:32", "| smgk:16"]


@pytest.mark.parametrize(
    "arguments", [["--length", "4097"], ["--layouts", "1x2"], ["--layouts", "1x2x3"], ["--page", "."]]
)
def test_bad_options_end_with_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        planning.main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_linear_attention_is_refused():
    config = DecoderConfig(64, variant="mlk")
    with pytest.raises(ValueError, match="config must have one mixture variant"):
        TrainingStep(config, Layout(1, 2, 1), 128)
