"""What a job asks of planning, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from heterodyne.api.optimizer_reach import OptimizerReach
from heterodyne.cluster.profile import Profile
from heterodyne.frontend import CapturedModel
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection, ParallelismSection
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.lower import Lowered
from heterodyne.plan.precision import Precisions
from heterodyne.search.planned import Planned

__all__ = ["Prepared", "Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What planning needs to know of a job, whether it came from a file or from arguments.

    ``training_steps``: of all training, None where that is not known.

    ``reach``: what an optimizer of the user's own must see at once; ``module_only``: why no plan may run pieces of the captured graph, as a
    check has found; ``compile``: torch.compile makes code of stages and whole models.
    """

    global_batch_size: int
    precision: Precisions
    optimizer: OptimizerSection
    parallelism: ParallelismSection
    reach: OptimizerReach = field(default_factory=OptimizerReach)
    module_only: str = ""
    compile: bool = False
    training_steps: int | None = None

    def able(self, graph: ModelGraph) -> Capabilities:
        """Return what runs exactly for this model."""
        predicts = self.parallelism.asynchronous is not None
        return Capabilities(graph, self.reach.reach, self.module_only, asynchronous=predicts)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a rank needs to run. ``planned`` only on rank 0, the one that searched."""

    captured: CapturedModel
    profile: Profile
    lowered: Lowered
    planned: Planned | None
