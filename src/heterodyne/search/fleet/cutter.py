"""The optimal cut of a model over the ranks of a pipeline for a number of micro-batches, messages between stages included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.arrays import Floats, Ints, between
from heterodyne.search.fleet.plan import Template, TemplateStage
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.tables import Table

__all__ = ["Cutter", "Places", "StageCosts", "least_cut"]


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Costs of the stages of one kind. Arrays have the shape [first layer, layer before which it ends].

    Args:
        plain_s: seconds of a micro-batch. ``again_s``: with recompute. Infinite where there is no layer.
        held: micro-batches in flight for which there is memory. ``held_again``: with recompute.
    """

    plain_s: Floats
    again_s: Floats
    held: Floats
    held_again: Floats

    @classmethod
    def of(cls, table: Table, memory_bytes: float, replicas: int, zero: int, *, recompute: bool) -> StageCosts:
        """``replicas``: pipelines that share state at the ZeRO level. ``recompute``: stages may be recomputed."""
        level = zero if replicas * table.widths.copies > 1 else 0
        forward, backward, recomputed = (between(own.tolist()) for own in table.passes)
        plain = forward + backward
        plain[np.tri(len(plain), dtype=bool)] = np.inf
        return cls(
            plain_s=plain,
            again_s=plain + recomputed if recompute else np.full_like(plain, np.inf),
            held=table.most_held(level, replicas, memory_bytes, recompute=False),
            held_again=table.most_held(level, replicas, memory_bytes, recompute=True),
        )

    def seconds(self, held: int | Ints, part: tuple[slice, slice] = (slice(None), slice(None))) -> Floats:
        """Of a micro-batch, if so many are in flight; infinite where a stage does not fit.

        ``held``: broadcast to the pairs of layers. ``part``: the first layers, and those before which stages end.
        """
        again_s = np.where(self.held_again[part] >= held, self.again_s[part], np.inf)
        found: Floats = np.where(self.held[part] >= held, self.plain_s[part], again_s)
        return found


Places = tuple[tuple[str, Widths, int], ...]
"""Stages of a pipeline, those of a kind together: a pool, how each shares its work, and how many there are."""


@dataclass(frozen=True, kw_only=True)
class Cutter:
    """Cuts pipelines. A stage is recomputed where it does not fit otherwise and the space allows it."""

    predictor: Predictor
    space: Space
    _costs: dict[tuple[str, Widths, int, int, int], StageCosts] = field(default_factory=dict, repr=False)

    def cut(self, runs: Places, size: int, rounds: int, replicas: int, zero: int) -> Iterator[Template]:
        """The optimal cuts for a number of micro-batches, and for very many, also with memory for split backwards; none where the pipeline
        does not fit.

        Args:
            size: of a micro-batch. ``rounds``: the number of them. ``replicas``: pipelines that share state at the ZeRO level.
        """
        places = [(pool, widths) for pool, widths, count in runs for _ in range(count)]
        many = len(places)
        if many > len(self.predictor.tables.costs.layers):
            return
        sends = self._sends(places, size)
        kinds = [self._cost(pool, widths, size, replicas, zero) for pool, widths in places]
        # Under 1F1B a stage holds a micro-batch for each one from itself on; where backwards are split, for each one of the pipeline.
        plain = [min(many - number, rounds) for number in range(many)]
        ways = [(rounds, plain), (None, plain)]
        if self.space.splits and many > 1:
            ways.append((None, [min(many, rounds)] * many))
        for count, held in ways:
            points = self._points(kinds, held, count, sends)
            if points is not None:
                stages = (
                    TemplateStage(
                        pool=place[0],
                        widths=place[1],
                        start=span[0],
                        stop=span[1],
                        recompute=bool(kind.held[span] < own),
                    )
                    for place, span, kind, own in zip(places, pairwise(points), kinds, held, strict=True)
                )
                yield Template(micro_batch=size, stages=tuple(stages))

    def _points(
        self, kinds: Sequence[StageCosts], held: Sequence[int], count: int | None, sends: Sequence[float]
    ) -> tuple[int, ...] | None:
        """See `least_cut`. ``held``: micro-batches in flight, by stage."""
        first = len(self.predictor.tables.costs.layers) - len(kinds) + 1
        overlap = self.predictor.software.overlap_sends
        waits = [a + b for a, b in zip((*sends, 0.0), (0.0, *sends), strict=True)]
        costs = []
        for number, (kind, own) in enumerate(zip(kinds, held, strict=True)):
            cost_s = kind.seconds(own, (slice(number, number + first), slice(number + 1, number + 1 + first)))
            costs.append(cost_s if overlap else cost_s + waits[number])
        return least_cut(costs, count, sends if overlap else ())

    def _cost(self, pool: str, widths: Widths, size: int, replicas: int, zero: int) -> StageCosts:
        key = pool, widths, size, replicas, zero
        if key not in self._costs:
            own = self.predictor.fleet.pool(pool)
            table = self.predictor.tables.table(own.kind, widths, size)
            assert table is not None  # it is one of the widths that the pool may have
            memory = float(own.memory_bytes)
            self._costs[key] = StageCosts.of(table, memory, replicas, zero, recompute=self.space.recompute)
        return self._costs[key]

    def _sends(self, places: Sequence[tuple[str, Widths]], size: int) -> list[float]:
        """Seconds of the messages between ranks; about the same wherever alike layers are cut."""
        layers = len(self.predictor.tables.costs.layers)
        spans = [*((n, n + 1) for n in range(len(places) - 1)), (len(places) - 1, layers)]
        stages = (
            TemplateStage(pool=pool, widths=widths, start=start, stop=stop)
            for (pool, widths), (start, stop) in zip(places, spans, strict=True)
        )
        return self.predictor.pipeline_time.least_sends(Template(micro_batch=size, stages=tuple(stages)))


def least_cut(
    costs: Sequence[Floats], micro_batches: int | None, sends: Sequence[float] = ()
) -> tuple[int, ...] | None:
    """The first layer of each stage of the best cut for so many micro-batches (None: for very many), and the number of layers.

    None where no cut fits.

    Stage i cannot begin before the ones before it have had the first micro-batch, nor end after they have begun the last
    backward, so n micro-batches take at least H[i] = max(n cost[i], cost[i] + 2 send[i] + H[i + 1]), which the cut makes least.

    Args:
        costs: seconds of each stage from the first layers that it may have to the ones of the next stage, infinite where it does not fit;
            every stage has a layer at least. Shape [stages][layers - stages + 1, layers - stages + 1].
        sends: of a message from each stage to the next one; none: they take no time.
    """
    first = len(costs[0])
    every = np.arange(first)
    reached = np.full(first, np.inf)
    reached[-1] = 0.0
    stops: list[Ints] = []
    for cost, send_s in zip(reversed(costs), (0.0, *reversed(sends or (0.0,) * (len(costs) - 1))), strict=True):
        after = reached[None, :]
        if micro_batches is None:
            ways = np.maximum(cost, after)
        else:
            ways = np.maximum(micro_batches * cost, cost + (2 * send_s + after))
        best = np.argmin(ways, axis=1)
        stops.append(best)
        reached = ways[every, best]
    if reached[0] == np.inf:
        return None
    points, own = [0], 0
    for place, stop in enumerate(reversed(stops), 1):
        own = int(stop[own])
        points.append(place + own)
    return tuple(points)
