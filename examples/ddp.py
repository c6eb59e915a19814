"""Train with several processes. EM priors sum their statistics over all of them.

torchrun --standalone --nproc-per-node 2 examples/ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mgk


def main(steps: int = 20) -> None:
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), mgk.Attention(64, 2, variant="smgk-em", is_causal=True), nn.LayerNorm(64), nn.Linear(64, 16)
    ).to(device)
    parallel = DistributedDataParallel(model, device_ids=[device.index] if has_gpu else None)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(rank)  # different data in each process
    for step in range(1, steps + 1):
        x = torch.randn(4, 32, 16, generator=generator).to(device)
        loss = (parallel(x)[:, 1:] - x[:, :-1]).square().mean()  # reproduce the previous vector
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    # The prior is a buffer that EM updates, not a parameter; it is the same in all processes.
    prior = next(buffer for name, buffer in model.named_buffers() if "prior" in name)
    priors = [torch.empty_like(prior) for _ in range(dist.get_world_size())]
    dist.all_gather(priors, prior)
    if rank == 0:
        print(f"priors of {len(priors)} processes are equal: {all(torch.equal(priors[0], other) for other in priors)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
