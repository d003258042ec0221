"""Several pipelines that need not be alike, each with its share of the batch: the devices are parted, and each part is a pipeline.

A part of one device runs the whole model. Shares are balanced by what each pipeline was drawn to take; then each is built for
its share, and after the whole is simulated, micro-batches move from those who wait least to those who wait most.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf

from heterodyne.errors import InfeasibleError
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Pipeline
from heterodyne.search.balance import balance
from heterodyne.search.drafts import Draft
from heterodyne.search.lines import partitions
from heterodyne.search.pipelines import Pipelines
from heterodyne.search.planned import Candidate
from heterodyne.search.predict import stage_of

__all__ = ["Replicas"]

_MOST_PARTITIONS = 3  # that are built and simulated; of many devices one
_MOST_MOVES = 2
_MANY = 5
Parts = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The search for pipelines beside each other. ``pipelines``: the search for one of them."""

    pipelines: Pipelines

    def candidates(self, below_s: float) -> tuple[Candidate, ...]:
        """The best of the few partitions that look best; none where ops mix the samples of a micro-batch, which needs like cuts."""
        model = self.pipelines.model
        if self.pipelines.count is not None or not Capabilities(model.graph).allow("unlike_pipelines"):
            return ()
        nodes = {device.id: device.node for device in model.cluster.devices}
        drawn: list[tuple[float, Parts, list[int]]] = []
        kinds = self.pipelines.kinds
        known: dict[tuple[int, ...], list[float] | None] = {}
        for parts in partitions(self.pipelines.usable, self.pipelines.kinds, self.pipelines.rate, nodes):
            for part in parts:
                if (alike := tuple(kinds[device] for device in part)) not in known:
                    known[alike] = self._table(part)
            tables = [known[tuple(kinds[device] for device in part)] for part in parts]
            usable = [table for table in tables if table is not None]
            if len(usable) < len(parts):
                continue
            try:
                shares = balance(usable, self.pipelines.samples)
            except InfeasibleError:
                continue
            if all(shares.shares):
                drawn.append((shares.longest_s, parts, list(shares.shares)))
        drawn.sort(key=lambda entry: entry[0])
        most = _MOST_PARTITIONS if len(self.pipelines.devices) <= _MANY else 1
        found = [self._moved(parts, shares) for longest, parts, shares in drawn[:most] if longest < 1.1 * below_s]
        possible = [candidate for candidate in found if candidate.step_s is not None]
        return (min(possible, key=lambda c: c.step_s or inf),) if possible else tuple(found[:1])

    def _moved(self, parts: Parts, shares: list[int]) -> Candidate:
        best = self._weighed(parts, shares)
        for _ in range(_MOST_MOVES):
            if best.plan is None or best.simulation is None:
                return best
            rank, wait = self.pipelines.model.cluster.rank, best.simulation.wait_s
            idle = [min(wait[rank(device)] for device in part) for part in parts]
            giver, taker = min(range(len(parts)), key=idle.__getitem__), max(range(len(parts)), key=idle.__getitem__)
            size = max(best.plan.pipelines[giver].micro_batches.sizes)
            moved = max(1, min(size, shares[giver] // 4))
            if giver == taker or shares[giver] <= moved:
                return best
            tried = list(shares)
            tried[giver] -= moved
            tried[taker] += moved
            candidate = self._weighed(parts, tried)
            if candidate.step_s is None or best.step_s is None or candidate.step_s >= best.step_s:
                return best
            best, shares = candidate, tried
        return best

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
            run = self.pipelines.runs[part[0]]
            return Pipeline(
                micro_batches=run.micro_batches(share),
                stages=(run.activations.on(stage_of((0, len(self.pipelines.model.graph.ops)), part)),),
            )
        return self.pipelines.beside(part, share)

    def _table(self, part: tuple[str, ...]) -> list[float] | None:
        """Seconds of a step by the number of samples; None if the part cannot run the model."""
        samples, rate = self.pipelines.samples, self.pipelines.rate
        if len(part) == 1:
            run = self.pipelines.runs.get(part[0])
            return None if run is None else run.table(samples)
        whole = sum(rate.values())
        usual = ceil(samples * sum(rate[d] for d in part) / whole) if 0 < whole < inf else samples
        try:
            draft = self.pipelines.drafts(part, max(1, min(samples, usual)))[0]
        except InfeasibleError:
            return None
        return _table_of(draft, samples)


def _table_of(draft: Draft, samples: int) -> list[float]:
    """As the draft goes: so much for every micro-batch, and the filling and draining once."""
    micro_batches: MicroBatches = draft.micro_batches
    each = draft.longest_s / len(micro_batches)
    once = draft.estimate_s - draft.longest_s
    size = max(micro_batches.sizes)
    values = [each * n / size if n > size else each for n in range(1, samples + 1)]
    return [0.0, *accumulate((once + value for value in values), max)]
