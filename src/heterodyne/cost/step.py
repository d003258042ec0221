"""The cost of every action of a program on every rank: what the simulator plays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from heterodyne.cost.routes import Route
from heterodyne.cost.stage import StageCosts
from heterodyne.plan.program import Action

__all__ = ["RankCosts", "Reduction", "StepCosts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """A bucket of gradients that a rank shares out with others, each of whom keeps a part of the sums.

    ``bytes``: all of it; ``own``: what is kept. ``stage``: of which one backward alone makes it, and which leaves ``own``; None: several
    do, so all of it is there from the first on, or, if not ``made``, none does, and it is there while it is reduced. ``opens``,
    ``closes``: the ops of the model at which that backward comes to the first and to the last of it; ``released``: what it has let go of
    when it comes to the first.
    """

    bytes: int
    own: int
    stage: int | None
    made: bool
    opens: int = 0
    closes: int = 0
    released: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCosts:
    """What one rank does in one step, all in seconds of that device when nothing disturbs it.

    Args:
        stages: by number, counted within the pipeline of the rank.
        ready: for each gradient bucket that the rank reduces, the stages that complete it, each with the fraction of its last B or W
            after which its part is complete; no stage: it is complete from the start.
        clip_s, step_s: clipping and the optimizer step.
        overhead_s: what a step takes besides its actions, spent at its start.
        overlap: seconds of compute lost per second of a collective in flight, in [0, 1].
        fixed_bytes: what does not depend on the micro-batches.
        coming_bytes: the part of that which is not there when a step begins: gradients that no buffer waits for, parameters that are
            gathered.
        gathered_bytes: of each stage whose parameters are shared out, the buckets that it reads, and what UNSHARD of each brings.
        reductions: of each bucket of gradients that are shared out, in order.
        workspace_bytes: what comes and goes inside a pass.
        holes_bytes: what a whole backward leaves unused of the heap besides.
        update_bytes: what comes and goes inside CLIP and STEP.
    """

    stages: Mapping[int, StageCosts]
    ready: Mapping[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    clip_s: float = 0.0
    step_s: float = 0.0
    overhead_s: float = 0.0
    overlap: float = 0.0
    fixed_bytes: int = 0
    workspace_bytes: int = 0
    holes_bytes: int = 0
    update_bytes: int = 0
    coming_bytes: int = 0
    gathered_bytes: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    reductions: Mapping[int, Reduction] = field(default_factory=dict)

    @property
    def compute_s(self) -> float:
        """Seconds of all actions and the overhead, undisturbed: no step of this rank is shorter."""
        passes = sum(stage.compute_s - sum(stage.fetch_s) for stage in self.stages.values())
        return passes + self.clip_s + self.step_s + self.overhead_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """What a step costs.

    Args:
        ranks: None for an idle rank.
        reduce_s: one value a gradient bucket, 0 for one that only one rank has; of its all-reduce, or of its reduce-scatter where state
            is sharded, and then ``gather_s`` of the all-gather of its weights, by GATHER or UNSHARD; each is gathered once at least.
        routes: what the ranks send to each other.
        norm_s: seconds in which the ranks agree on the norm of all gradients, before CLIP; None: each knows it by itself, since it has
            all of them.
        ranks_meet: whether no rank updates or ends its step before each has run its last backward, as where all of them learn the loss.
        ranks_begin_together: whether none begins before all have, as where they count together what the loss is averaged over.
        meeting_s: seconds of each such meeting, from the moment at which the last rank comes, straight from computing.
    """

    ranks: tuple[RankCosts | None, ...]
    reduce_s: tuple[float, ...] = ()
    gather_s: tuple[float, ...] = ()
    routes: tuple[Route, ...] = ()
    norm_s: float | None = None
    ranks_meet: bool = False
    ranks_begin_together: bool = False
    meeting_s: float = 0.0

    def repeated(self, batches: int) -> StepCosts:
        """Return the costs of so many batches, one behind the other, between which ranks do not meet. What a step takes besides its
        actions is counted with each update."""
        ranks = tuple(
            own
            and replace(
                own,
                stages={number: stage.repeated(batches) for number, stage in own.stages.items()},
                overhead_s=0.0,
                step_s=own.step_s + own.overhead_s,
            )
            for own in self.ranks
        )
        routes = tuple(route.repeated(batches) for route in self.routes)
        return replace(self, ranks=ranks, routes=routes, norm_s=None, ranks_meet=False, ranks_begin_together=False)

    @property
    def lower_bound_s(self) -> float:
        """No step is shorter: all that one rank computes, all its collectives, and all that goes over one link, one after another."""
        active = [costs for costs in self.ranks if costs is not None]
        links: dict[str, float] = {}
        for route in self.routes:
            links[route.link] = links.get(route.link, 0.0) + sum(route.seconds)
        return max(
            [
                0.0,
                *(costs.compute_s for costs in active),
                *(
                    sum(of[bucket] for of in (self.reduce_s, self.gather_s) if of for bucket in costs.ready)
                    for costs in active
                ),
                *links.values(),
            ]
        )

    def collective_s(self, action: Action) -> float:
        """Seconds of a collective. Raises KeyError for one that has no cost."""
        values, place = self.gather_s if action.kind in ("GATHER", "UNSHARD") else self.reduce_s, action.index
        if place is None or place >= len(values):
            raise KeyError(f"there is no cost of {action}")
        return values[place]
