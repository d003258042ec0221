"""Plans on paper device by device, for few of them: the search and the simulator of devices that are here, over a profile from datasheets.

The search over fleets counts alike devices, and knows of state that is sharded evenly; this one knows all that the runtime does: shards by
memory, parameters too, state and activations on hosts, blocks that keep some of their ops.
"""

from __future__ import annotations

from heterodyne.api.offline import measured_precision
from heterodyne.api.paper_costs import paper_precisions, paper_software, with_datasheets
from heterodyne.cluster.fleet import Fleet
from heterodyne.cluster.profile import Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.recipe import Recipe
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Job
from heterodyne.plan.capabilities import Capabilities
from heterodyne.predictor.datasheet_profile import believed_cluster, datasheet_profile
from heterodyne.search.planned import Planned
from heterodyne.search.planner import plan

__all__ = ["FEW_DEVICES", "by_datasheets", "planned_by_device"]

FEW_DEVICES = 16
"""More of them are searched by counting alone."""


def by_datasheets(job: Job, fleet: Fleet, graph: ModelGraph) -> tuple[Cluster, Profile]:
    """Return the devices of a fleet, and what measuring them would find. Raises ClusterError for a kind of which too little is known."""
    batch, given = job.training.global_batch_size, job.parallelism.micro_batch_sizes
    profile = datasheet_profile(
        graph,
        with_datasheets(fleet),
        sizes=tuple(1 << power for power in range(batch.bit_length())) if given == "auto" else given,
        recipe=Recipe(
            optimizer=job.optimizer.name, momentum=job.optimizer.momentum, precision=paper_precisions(job, fleet)
        ),
        software=paper_software(job),
    )
    return believed_cluster(fleet), profile


def planned_by_device(job: Job, cluster: Cluster, profile: Profile, graph: ModelGraph) -> Planned:
    """The fastest plan by prediction, which runs. Raises InfeasibleError with what each device lacks, and what would help."""
    buckets, given = job.parallelism.bucket_size, job.parallelism.micro_batch_sizes
    return plan(
        graph,
        cluster,
        profile,
        global_batch_size=job.training.global_batch_size,
        micro_batch_sizes=None if given == "auto" else given,
        optimizer=job.optimizer.name,
        momentum=job.optimizer.momentum,
        precision=measured_precision(cluster, profile),
        bucket_bytes=None if buckets == "auto" else buckets,
        clip=job.training.clip_grad_norm > 0,
        strategy=job.parallelism.strategy,
        able=Capabilities(graph, job.optimizer.reach, asynchronous=job.parallelism.asynchronous is not None),
    )
