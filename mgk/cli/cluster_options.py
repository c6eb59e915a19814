"""Options of the commands that run training jobs on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mgk._core.validation import fail
from mgk.cli.app import check_bounds

if TYPE_CHECKING:
    from mgk.training.cluster import ClusterOptions

ClusterName = Annotated[
    str | None, typer.Option(help="Run the training on a cluster: slurm. Default: on this machine.")
]
Partition = Annotated[str | None, typer.Option(help="With --cluster: partition of the jobs.")]
GpusPerNode = Annotated[
    int | None, typer.Option(callback=check_bounds("--gpus-per-node", 1), help="With --cluster: GPUs of each job.")
]
TimeLimit = Annotated[
    str | None,
    typer.Option(
        "--time",
        help="With --cluster: time limit of a job, after which it saves and requeues itself; default: 04:00:00.",
    ),
]
MaxParallel = Annotated[
    int | None,
    typer.Option(
        callback=check_bounds("--max-parallel", 1),
        help="With --cluster: number of jobs that run at the same time; default: all.",
    ),
]


def read_cluster_options(
    cluster: str | None,
    partition: str | None,
    gpus_per_node: int | None,
    time_limit: str | None,
    max_parallel: int | None,
) -> ClusterOptions | None:
    """Return the resources of jobs on a cluster, or None for this machine; check that jobs can be submitted."""
    from mgk.training.cluster import DEFAULT_TIME, ClusterOptions, check_cluster

    if cluster is None:
        options = {"--partition": partition, "--gpus-per-node": gpus_per_node, "--time": time_limit}
        for option, value in (options | {"--max-parallel": max_parallel}).items():
            if value is not None:
                fail(option, "has no effect without --cluster: add --cluster slurm")
        return None
    checked = ClusterOptions(partition, gpus_per_node, time_limit or DEFAULT_TIME, max_parallel)
    check_cluster(cluster, checked)
    return checked
