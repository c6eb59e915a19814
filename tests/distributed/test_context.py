"""Context parallelism: outputs and all gradients of 2 and 4 ranks equal those of one process."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mgk
from mgk.distributed import context_parallel, local_positions, reduce_gradients, shard, sharded_attention, unshard
from mgk.models import Classifier, DecoderConfig, EncoderConfig, LanguageModel
from tests.distributed import context_cases
from tests.support.memory import PeakMemory
from tests.support.workers import run_workers


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_variant_equals_one_process(tmp_path, ranks):
    results = [row for rank in run_workers(context_cases.work, ranks, tmp_path) for row in rank]
    assert len(results) >= ranks * 40
    # In fp32, a sum with much cancellation may be off by chance in one case: the limit is that of all cases.
    limits: dict[str, float] = {}
    for _, _, _, errors_of_one in results:
        for name, error in (errors_of_one or {}).items():
            limits[name] = max(limits.get(name, 0.0), 4 * error + 1e-6)
    too_large = [
        (case, name, error)
        for case, is_exact, errors, _ in results
        for name, error in errors.items()
        if not error <= (1e-10 if is_exact else limits[name])
    ]
    assert not too_large, "\n".join(map(str, too_large))


F64 = torch.float64


def close(actual, expected, limit=1e-10):
    actual, expected = actual.detach(), expected.detach()
    assert float((actual - expected).abs().max()) <= limit * max(1.0, float(expected.abs().max()))


def check_operators(mesh):
    """Compare an operator with priors, scales and float masks per key, and its lse, with one process."""
    torch.manual_seed(0)
    length, rank_sum = 4 * mesh.size(), lambda x: dist.all_reduce(x.grad)
    sizes = {"query": (2, 4, length, 5), "key": (2, 2, length, 5), "value": (2, 2, length, 3), "shift": (2, 3, 5)}
    sizes |= {"log_prior": (2, 2, 3, length), "scale": (2, 2, 3, length), "similarity": (2,)}
    whole = {name: torch.randn(size, dtype=F64) for name, size in sizes.items()}
    whole["scale"] = whole["scale"].exp()
    key_mask = torch.randn(2, 1, 1, length, dtype=F64)
    key_mask[..., 1] = -torch.inf
    local = {
        name: shard(x, mesh, x.dim() - 1 - (name in ("query", "key", "value"))) if length in x.shape else x.clone()
        for name, x in {**whole, "attn_mask": key_mask}.items()
    }
    whole["attn_mask"] = key_mask
    for x in (*whole.values(), *local.values()):
        x.requires_grad_()
    expected, expected_lse = mgk.smgk_attention(**whole, is_causal=True, return_lse=True)
    actual, lse = sharded_attention(mgk.smgk_attention, **local, is_causal=True, return_lse=True, mesh=mesh)
    close(actual, shard(expected, mesh, 2))
    close(lse, shard(expected_lse, mesh, 2))
    weight, lse_weight = torch.randn_like(expected), torch.randn_like(expected_lse)
    ((expected * weight).sum() + (expected_lse * lse_weight).sum()).backward()
    ((actual * shard(weight, mesh, 2)).sum() + (lse * shard(lse_weight, mesh, 2)).sum()).backward()
    for name, x in local.items():
        if length not in whole[name].shape:
            rank_sum(x)
            close(x.grad, whole[name].grad)
        else:
            close(x.grad, shard(whole[name].grad, mesh, x.dim() - 1 - (name in ("query", "key", "value"))))


def check_models(mesh):
    """Compare a language model of several variants, losses and gradients, with one process."""
    for form in ({"positions": "sinusoidal"}, {"positions": "rotary", "mlp": "swiglu"}):
        config = DecoderConfig(
            11, embed_dim=8, ffn_dim=16, num_layers=3, num_heads=2, head_dim=4, dropout=0.0,
            variant=("smgk", "mlk", "softmax"), **form,
        )  # fmt: skip
        torch.manual_seed(0)
        one = LanguageModel(config).double()
        many = LanguageModel(config).double()
        many.load_state_dict(one.state_dict())
        context_parallel(many, mesh)
        tokens, targets = torch.randint(11, (2, 2, 8 * mesh.size()))
        expected = one.losses(tokens, targets)
        actual = many.losses(shard(tokens, mesh), shard(targets, mesh))
        close(unshard(actual, mesh), expected)
        expected.mean().backward()
        # A mean over the rows of this rank, and the mean of the ranks, as DDP computes it.
        (actual.mean() / mesh.size()).backward()
        reduce_gradients(many, mesh)
        for parameter, reference in zip(many.parameters(), one.parameters(), strict=True):
            assert (parameter.grad is None) == (reference.grad is None)
            if reference.grad is not None:
                close(parameter.grad, reference.grad)


def check_refusals(mesh):
    """Return the messages of all calls that context parallelism does not support."""
    x = torch.randn(1, 8, 8)
    layer = lambda **options: context_parallel(mgk.Attention(8, 2, **options), mesh)  # noqa: E731
    offsets = torch.tensor([0, 3, 4 * mesh.size()], dtype=torch.int32)
    calls = {
        "cache": lambda: layer().eval()(x, cache=layer().make_cache(1, 8)),
        "need_weights": lambda: layer()(x, need_weights=True),
        "dropout": lambda: layer(dropout=0.5)(x),
        "preset": lambda: layer(variant="mlk", preset="ref-lra")(x),
        "query": lambda: layer()(x[:, :7]),
        "attn_mask": lambda: layer()(x, attn_mask=torch.ones(8, 9, dtype=torch.bool)),
        "cu_seqlens": lambda: layer()(x, cu_seqlens=torch.tensor([0, 8], dtype=torch.int32)),
        "x": lambda: shard(x[:, :7], mesh),
        "module": lambda: context_parallel(torch.nn.Linear(2, 2), mesh),
        "mesh": lambda: context_parallel(layer(), "cpu"),
        "dropout_p": lambda: sharded_attention(
            mgk.smgk_attention, *torch.randn(3, 1, 2, 4, 5), torch.randn(2, 2, 5), dropout_p=0.1, mesh=mesh
        ),
        "max_seqlen_q": lambda: sharded_attention(
            mgk.smgk_attention,
            *torch.randn(3, 1, 2, 4, 5),
            torch.randn(2, 2, 5),
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=1,
            mesh=mesh,
        ),
        "length": lambda: local_positions(3, mesh),
    }
    config = EncoderConfig(5, 2, 8)
    calls["module is a Classifier"] = lambda: context_parallel(Classifier(config), mesh)
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            messages[name] = str(error)
    return {name: messages.get(name, "not refused") for name in calls}


def peak_memory(*meshes):
    """Return the peak memory of a training step of a sequence, in bytes, for each mesh."""
    x = torch.randn(1, 2048, 16)
    peaks = []
    for mesh in meshes:
        layer = context_parallel(mgk.Attention(16, 2, is_causal=True, backend="sdpa"), mesh)
        part = shard(x, mesh)
        with PeakMemory() as memory:
            layer(part).sum().backward()
        peaks.append(memory.peak)
    return peaks


def work(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    check_operators(mesh)
    check_models(mesh)
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
    return check_refusals(mesh), peak_memory(halves, mesh)


@pytest.mark.slow
def test_operators_models_refusals_and_memory(tmp_path):
    for messages, (peak_of_two, peak_of_four) in run_workers(work, 4, tmp_path):
        assert [name for name, message in messages.items() if not message.startswith(name)] == []
        assert peak_of_four < 0.55 * peak_of_two


def test_shard_and_positions_agree(tmp_path):
    """Check the balanced split with a mesh of one rank, which has the whole sequence."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = torch.arange(12)
        assert torch.equal(shard(x, mesh, 0), x)
        assert torch.equal(unshard(x, mesh, 0), x)
        assert torch.equal(local_positions(12, mesh), x)
        cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
        assert local_positions(12, mesh, cu_seqlens).tolist() == [*range(5), *range(7)]
        layer = context_cases.make_layer("smgk", True, F64)
        expected = layer(torch.ones(1, 8, context_cases.EMBED, dtype=F64))
        close(context_parallel(layer, mesh)(torch.ones(1, 8, context_cases.EMBED, dtype=F64)), expected)
    finally:
        dist.destroy_process_group()


# One rank: its number and the directory of the rendezvous are arguments.
GRADIENTS_OF_A_RANK = """
import sys, torch, torch.distributed as dist, mgk
from torch.distributed.device_mesh import init_device_mesh
from mgk.distributed import shard, sharded_attention

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
whole = [x.requires_grad_() for x in torch.randn(3, 1, 2, 8, 4, dtype=torch.float64)]
shift, probe = torch.randn(2, 2, 4).double(), torch.randn(1, 2, 8, 4).double()
(mgk.smgk_attention(*whole, shift, is_causal=True) * probe).sum().backward()
parts = [shard(x.detach(), mesh, 2).requires_grad_() for x in whole]
output = sharded_attention(mgk.smgk_attention, *parts, shift, mesh=mesh, is_causal=True)
(output * shard(probe, mesh, 2)).sum().backward()
for part, x in zip(parts, whole, strict=True):
    torch.testing.assert_close(part.grad, shard(x.grad, mesh, 2))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_hash_seed_of_a_process(tmp_path):
    """Strings of a set have another order in each process; gradients of keys and values travelled in this order."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GRADIENTS_OF_A_RANK, str(rank), str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, seed in enumerate(("0", "2"))
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
