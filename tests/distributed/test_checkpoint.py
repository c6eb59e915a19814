"""Checkpoints of sharded models: saved and loaded with different numbers of ranks and shardings, without pickle."""

import json
import shutil

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from mgk.distributed import gather_weights, load_checkpoint, save_checkpoint, tensor_parallel
from mgk.models import DecoderConfig, LanguageModel
from mgk.models.checkpoint import load_model, save_model
from tests.distributed.test_tensor import decoders
from tests.support.workers import run_workers

HAS_FSDP = hasattr(torch.cpu.Stream, "record_event")  # torch 2.6 has no FSDP on a CPU
TOKENS = torch.randint(11, (4, 2, 17), generator=torch.Generator().manual_seed(1))


def make(sharding="one"):
    """Return a model, sharded over all ranks, its optimizer, and the rows of a batch that this rank has."""
    model, rows = decoders(mlp="swiglu")[0], slice(0, 2)
    meshes = {"tp": (1, 2), "fsdp": (2, 1), "fsdp × tp": (2, 2), "tp × 4": (1, 4)}
    if sharding != "one":
        mesh = init_device_mesh("cpu", meshes[sharding], mesh_dim_names=("dp", "tp"))
        if mesh["tp"].size() > 1:
            tensor_parallel(model, mesh["tp"])
        if mesh["dp"].size() > 1:
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            for module in (*model.layers, model):
                fully_shard(module, mesh=mesh["dp"])
            register_fsdp_forward_method(model, "losses")
            rows = slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))
    return model, optimizer, rows


def train(model, optimizer, rows, steps):
    for tokens in TOKENS[steps]:
        optimizer.zero_grad()
        model.losses(tokens[rows, :-1], tokens[rows, 1:]).mean().backward()
        optimizer.step()


def weights_of(model):
    return {name: x.tolist() for name, x in gather_weights(model).items()}


def save(rank, ranks, sharding, directory):
    """Train two steps, save a checkpoint and, on one rank, the model in the layout of one process."""
    model, optimizer, rows = make(sharding)
    train(model, optimizer, rows, slice(0, 2))
    optimizer.param_groups[0]["lr"] = 0.02
    save_checkpoint(directory, model, optimizer, {"step": 2})
    weights = gather_weights(model)
    if rank == 0:
        save_model(model, f"{directory}/model", weights)


def resume(rank, ranks, sharding, directory):
    """Load a checkpoint and train two more steps; return the weights before and after them."""
    model, optimizer, rows = make(sharding)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    values = load_checkpoint(directory, model, optimizer)
    loaded = weights_of(model)
    train(model, optimizer, rows, slice(2, 4))
    return values, loaded, weights_of(model)


def difference(actual, expected):
    assert actual.keys() == expected.keys()
    pairs = [
        (torch.tensor(actual[name], dtype=torch.float64), torch.tensor(x, dtype=torch.float64))
        for name, x in expected.items()
        if x
    ]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Train in one process; return its checkpoint, its weights after two steps, and after four."""
    directory = tmp_path_factory.mktemp("one") / "checkpoint"
    save(0, 1, "one", directory)
    values, loaded, final = resume(0, 1, "one", directory)
    assert values == {"step": 2}
    return directory, loaded, final


SHARDINGS = [("fsdp × tp", 4, "tp", 2), ("tp × 4", 4, "fsdp", 2)] if HAS_FSDP else [("tp × 4", 4, "tp", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("saved, ranks, loaded, loaded_ranks", SHARDINGS)
def test_a_checkpoint_changes_shape(tmp_path, reference, saved, ranks, loaded, loaded_ranks):
    directory_of_one, at_checkpoint, final = reference
    directory = tmp_path / "checkpoint"
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    run_workers(save, ranks, tmp_path / "a", saved, str(directory))
    files = sorted(path.name for path in directory.iterdir() if path.is_file())
    assert files == ["checkpoint.json", *(f"rank-{rank:05d}.safetensors" for rank in range(ranks))]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "checkpoint"]
    results = [resume(0, 1, "one", directory)]
    results += run_workers(resume, loaded_ranks, tmp_path / "b", loaded, str(directory))
    # Also a checkpoint of one process, on all ranks.
    results += run_workers(resume, ranks, tmp_path / "c", saved, str(directory_of_one))
    for values, weights, weights_after in results:
        assert values == {"step": 2}
        assert difference(weights, at_checkpoint) < 1e-10
        assert difference(weights_after, final) < 1e-10
    model = load_model(directory / "model")
    assert difference(weights_of(model), at_checkpoint) < 1e-6  # saved models are loaded in fp32


def test_existing_checkpoint_is_replaced(tmp_path, reference):
    directory = tmp_path / "checkpoint"
    shutil.copytree(reference[0], directory)
    (directory / "stale").touch()
    model, optimizer, _ = make()
    save_checkpoint(directory, model, optimizer)
    assert not (directory / "stale").exists()
    assert load_checkpoint(directory, model, optimizer) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_other_directories_are_not_replaced(tmp_path):
    model, optimizer, _ = make()
    directory = tmp_path / "documents"
    directory.mkdir()
    save_checkpoint(directory, model, optimizer)
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / "thesis.txt").touch()
    with pytest.raises(ValueError, match="is not a sharded checkpoint: choose another name"):
        save_checkpoint(directory, model, optimizer)
    assert [path.name for path in tmp_path.rglob("*")] == ["documents", "thesis.txt"]


def test_wrong_and_damaged_checkpoints_are_refused(tmp_path, reference):
    model, optimizer, _ = make()
    before = weights_of(model)
    directory = tmp_path / "checkpoint"
    with pytest.raises(ValueError, match="not a sharded checkpoint"):
        load_checkpoint(directory, model)
    shutil.copytree(reference[0], directory)
    other = LanguageModel(DecoderConfig(11, embed_dim=8, num_layers=1, num_heads=2, head_dim=4))
    with pytest.raises(ValueError, match=r"another model|lacks"):
        load_checkpoint(directory, other)
    with pytest.raises(ValueError, match="lacks"):
        load_checkpoint(directory, model, torch.optim.SGD(model.parameters()))
    wider = LanguageModel(DecoderConfig(**{**vars(model.config), "ffn_dim": 32}))
    with pytest.raises(ValueError, match="of shape"):
        load_checkpoint(directory, wider)
    index = json.loads((directory / "checkpoint.json").read_text())
    for change in ({"format": "other"}, {"tensors": {"model.x": {}}}, {"values": 3}):
        (directory / "checkpoint.json").write_text(json.dumps({**index, **change}))
        with pytest.raises(ValueError, match="damaged"):
            load_checkpoint(directory, model)
    text = json.dumps(index)
    (directory / "checkpoint.json").write_text(text.replace("rank-00000", "../rank-00000"))
    with pytest.raises(ValueError, match="not the name of a file"):
        load_checkpoint(directory, model)
    (directory / "checkpoint.json").write_text(text)
    data = (directory / "rank-00000.safetensors").read_bytes()
    (directory / "rank-00000.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"rank-00000\.safetensors is damaged"):
        load_checkpoint(directory, model, optimizer)
    (directory / "rank-00000.safetensors").unlink()
    with pytest.raises(ValueError, match=r"rank-00000\.safetensors is missing"):
        load_checkpoint(directory, model, optimizer)
    directory.rename(tmp_path / ".checkpoint.former")
    with pytest.raises(ValueError, match="was being replaced"):
        load_checkpoint(directory, model)
    assert difference(weights_of(model), before) == 0
