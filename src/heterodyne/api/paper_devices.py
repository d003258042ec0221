"""Plans on paper device by device, for few of them: the search and the simulator of devices that are here, over a profile from datasheets.

The search over fleets counts alike devices, and knows of state that is sharded evenly; this one knows all that the runtime does: shards by
memory, parameters too, state and activations on hosts, blocks that keep some of their ops.
"""

from __future__ import annotations

from heterodyne.api.paper_costs import paper_precisions, paper_software
from heterodyne.cluster.fleet import Fleet
from heterodyne.cost.recipe import Recipe
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Job
from heterodyne.plan.capabilities import Capabilities
from heterodyne.predictor.datasheet_profile import believed_cluster, datasheet_profile
from heterodyne.search.planned import Planned
from heterodyne.search.planner import plan

__all__ = ["FEW_DEVICES", "planned_by_device"]

FEW_DEVICES = 16
"""More of them are searched by counting alone."""


def planned_by_device(job: Job, fleet: Fleet, graph: ModelGraph) -> Planned:
    """The fastest plan by prediction, which runs. Raises InfeasibleError with what each device lacks, and what would help."""
    batch = job.training.global_batch_size
    given = job.parallelism.micro_batch_sizes
    sizes = tuple(1 << power for power in range(batch.bit_length())) if given == "auto" else given
    buckets = job.parallelism.bucket_size
    precision = paper_precisions(job, fleet)
    profile = datasheet_profile(
        graph,
        fleet,
        sizes=sizes,
        recipe=Recipe(optimizer=job.optimizer.name, momentum=job.optimizer.momentum, precision=precision),
        software=paper_software(job),
    )
    return plan(
        graph,
        believed_cluster(fleet),
        profile,
        global_batch_size=batch,
        micro_batch_sizes=sizes,
        optimizer=job.optimizer.name,
        momentum=job.optimizer.momentum,
        precision=precision,
        bucket_bytes=None if buckets == "auto" else buckets,
        clip=job.training.clip_grad_norm > 0,
        strategy=job.parallelism.strategy,
        able=Capabilities(graph, job.optimizer.reach),
    )
