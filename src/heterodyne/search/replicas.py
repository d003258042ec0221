"""Several pipelines, possibly unlike, each with its share of the batch.

The search over device classes (`search.by_class`) says which devices form a pipeline, and its share. Each is cut again for its devices
and gets its own order; a pipeline of one device runs the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from heterodyne.errors import InfeasibleError
from heterodyne.plan.plan import Pipeline, Plan
from heterodyne.search.pipelines import Pipelines
from heterodyne.search.planned import CUTTING_PAYS, Candidate
from heterodyne.search.predict import stage_of

__all__ = ["Replicas"]

Parts = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The search for pipelines beside each other. ``pipelines``: the search for one of them."""

    pipelines: Pipelines

    def candidates(self, plans: Iterable[Plan], below_s: float) -> tuple[Candidate, ...]:
        """The fastest of what is made of plans for classes of devices, if it can be weighed below so many seconds."""
        drawn: dict[Parts, list[int]] = {}
        for plan in plans:
            working = [pipeline for pipeline in plan.pipelines if pipeline.micro_batches.samples]
            parts = tuple(tuple(dict.fromkeys(d for s in p.stages for d in s.devices)) for p in working)
            cut = any(len(pipeline.stages) > 1 for pipeline in working)
            if 1 < len(parts) < len(plan.devices) and cut and not any(s.sharded for p in working for s in p.stages):
                drawn.setdefault(parts, [pipeline.micro_batches.samples for pipeline in working])
        found: list[Candidate] = []
        for parts, shares in drawn.items():
            if self._least_s(parts, shares) / CUTTING_PAYS < min([below_s, *(c.weighed_s for c in found)]):
                found.append(self._weighed(parts, shares))
        return (min(found, key=lambda c: c.weighed_s),) if found else ()

    def _least_s(self, parts: Parts, shares: Sequence[int]) -> float:
        """If no device of a part ever waits."""
        rate = self.pipelines.lines.rate
        return max(share / sum(rate[d] for d in part) for part, share in zip(parts, shares, strict=True))

    def _weighed(self, parts: Parts, shares: list[int]) -> Candidate:
        name = f"{len(parts)} pipelines: " + " | ".join(" + ".join(part) for part in parts)
        try:
            made = tuple(self._pipeline(part, share) for part, share in zip(parts, shares, strict=True))
        except InfeasibleError as error:
            return Candidate(name=name, kind="replicas", why_not=str(error))
        return self.pipelines.weighed(name, "replicas", made, "1F1B")

    def _pipeline(self, part: tuple[str, ...], share: int) -> Pipeline:
        """The pipeline of a part that is done first by itself."""
        if len(part) == 1:
            run = self.pipelines.runs.get(part[0])
            if run is None:
                raise InfeasibleError(f"{part[0]} has no room for the whole model")
            return Pipeline(
                micro_batches=run.micro_batches(share),
                stages=(run.stage or stage_of((0, len(self.pipelines.model.graph.ops)), part),),
            )
        return self.pipelines.beside(part, share)
