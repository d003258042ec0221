"""A lower bound on the step time of any plan, with whole layers, whole micro-batches and the exposed gradient sync of each stage.

`Covering` decides feasibility for one step time; bisection over times gives the bound. It also holds for virtual stages. Pipeline
bubbles and asynchronous messages are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np

from heterodyne.cost.layers import Widths
from heterodyne.predictor.constants import constants
from heterodyne.predictor.overlap import exposed_s, returned_s
from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.counts import Limits
from heterodyne.search.fleet.covering import Covering, Places
from heterodyne.search.fleet.evaluated_plan import EvaluatedPlan
from heterodyne.search.fleet.fleet_wires import Wires
from heterodyne.search.fleet.kinds import Kind
from heterodyne.search.fleet.stage_kinds import StageKinds

__all__ = ["Cover"]

_CLOSE = 5e-3  # of a time, the part to which the bound is known


@dataclass(frozen=True, kw_only=True)
class Cover:
    """The bound for one space without a budget, for a model whose layers between the first and the last are alike."""

    kinds: StageKinds
    limits: Limits
    _names: dict[tuple[int, Widths], int] = field(default_factory=dict, repr=False)
    _devices: list[tuple[int, int]] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, kinds: StageKinds, limits: Limits) -> Cover | None:
        """None where the bound does not apply."""
        layers = kinds.predictor.tables.costs.layers
        if len(layers) < 3 or len(set(layers[1:-1])) > 1 or np.isfinite(limits.budget):
            return None
        found = cls(kinds=kinds, limits=limits)
        for size in kinds.sizes:
            for kind in kinds.of(size):
                if (kind.pool, kind.widths) not in found._names:
                    found._names[kind.pool, kind.widths] = len(found._names)
                    found._devices.append((kind.pool, kind.devices))
        return found if found._names else None

    def bound_s(self, known: EvaluatedPlan) -> float:
        """Seconds that no step is shorter than, at most ``known``, the step of a known plan.

        With fewer replicas there is less to sync and each holds more of the sharded state, so the bound is taken over ranges of replica
        counts.
        """
        bound_s = known.predicted.step_s
        most = int(self.limits.room.sum())
        most = min(most, self.limits.most or most)
        spans = [(1, 1), *((2**n + 1, 2 ** (n + 1)) for n in range(most.bit_length()))]
        spans = [(first, min(most, last)) for first, last in spans if first <= most and last >= self.limits.least]
        # First as many as are known to be good, since of all others no less need be shown than of these.
        spans.sort(key=lambda span: known.plan.pipelines not in range(span[0], span[1] + 1))
        prices = np.full(len(self.limits.room) + 1, 1.0)
        for first, last in spans:
            bound_s, prices = self._of_replicas(first, last, bound_s, prices)
        return bound_s

    def _of_replicas(self, first: int, last: int, known_s: float, prices: Floats) -> tuple[float, Floats]:
        """The bound for one range of replica counts, and the last dual prices, as a start for the next range."""
        places = [self._places(size, first, last) for size in self.kinds.sizes if self.kinds.of(size)]
        covering = Covering(
            devices=self._devices,
            room=self.limits.room,
            batch=self.kinds.predictor.global_batch,
            layers=len(self.kinds.predictor.tables.costs.layers) - 2,
        )
        could, prices = covering.could(places, last, known_s, prices)
        if not could:
            return known_s, prices
        low, high = 0.0, known_s
        step = _CLOSE
        while high - low > _CLOSE * high:
            # Rarely far below what is known, so in steps that become longer.
            tried = max((low + high) / 2, high * (1 - step)) if low else high * (1 - step)
            step = min(0.5, 4 * step)
            could, prices = covering.could(places, last, tried, prices)
            low, high = (low, tried) if could else (tried, high)
        return low, prices

    def _places(self, size: int, first: int, last: int) -> Places:
        kinds = self.kinds.of(size)
        layers = len(kinds[0].table.costs)
        inner = np.arange(layers - 1)
        starts = np.concatenate([0 * inner, 0 * inner + 1, layers - 1 - inner, [0]])
        stops = np.concatenate([inner + 1, inner + 1, 0 * inner + layers, [layers]])
        own = np.array([self._place(kind, starts, stops, first, last) for kind in kinds]).transpose(1, 0, 2)
        (seconds, sync_and_update_s), (whole_s, after_whole_s) = own[..., :-1], own[..., -1]
        shape = len(kinds), 3, len(inner)
        return Places(
            size=size,
            kinds=np.array([self._names[kind.pool, kind.widths] for kind in kinds]),
            seconds=seconds.reshape(shape).swapaxes(0, 1),
            sync_and_update_s=sync_and_update_s.reshape(shape).swapaxes(0, 1),
            whole_s=whole_s,
            after_whole_s=after_whole_s,
        )

    def _place(self, kind: Kind, start: Ints, stop: Ints, first: int, last: int) -> tuple[Floats, Floats]:
        """Seconds per micro-batch at the fastest ZeRO level, infinite where nothing fits, and seconds of sync after the pipelines."""
        table, predictor, space = kind.table, self.kinds.predictor, self.kinds.space
        forward, backward, recomputed = (own[stop] - own[start] for own in table.passes)
        shared = first * kind.widths.copies > 1
        device, dense, _ = table.sent(start, stop).carried(first)
        gradients, updated, parameters = (
            self._exchanged_s(kind, own, copy, first) for own, copy in zip(device, dense, strict=True)
        )
        found = np.full(start.shape, np.inf)
        for zero in dict.fromkeys((space.low_zero, *space.high_zero)):
            level = zero if last * kind.widths.copies > 1 else 0
            # Of layers that are apart only one is whole at a time, not two neighbours.
            apart = float(max(c.gradient_bytes + c.parameter_bytes for c in table.costs)) if level > 1 else 0.0
            fits, again = (
                table.most_held(level, last, kind.memory_bytes + apart, recompute=recompute)[start, stop] >= 1
                for recompute in (False, space.recompute)
            )
            beside = (gradients if level > 1 else 0.0) + (parameters if level > 2 else 0.0)
            ahead = np.maximum(forward, parameters) if level > 2 else forward
            plain, more = (ahead + np.maximum(own, beside) for own in (backward, backward + recomputed))
            found = np.minimum(found, np.where(fits, plain, np.where(again, more, np.inf)))
        if not predictor.software.overlap_sends:
            # An end of a pipeline sends a message for each micro-batch, all other places two; who has all layers sends none.
            messages = 2 - (start == 0) - (stop == len(table.costs))
            found = np.where(messages > 0, found + messages * self._send_s(kind), found)
        whole, own = table.updates_s(start, stop)
        stated, hidden_by = constants().stated, backward + recomputed
        after = np.full(start.shape, np.inf)
        if not shared or 0 in space.zero:
            reduced = 2 * gradients
            after = (exposed_s(reduced, hidden_by, stated) if predictor.software.overlap_gradients else reduced) + whole
        if shared and max(space.zero) > 0:
            back = returned_s(updated, stated) if predictor.software.overlap_gradients else updated
            scattered = exposed_s(gradients, hidden_by, stated) if predictor.software.overlap_gradients else gradients
            after = np.minimum(after, scattered + back + own / last)
        return found, after

    def _exchanged_s(self, kind: Kind, own: Floats, copy: Floats, replicas: int) -> Floats:
        """Lower bound on the seconds of one ring pass (a reduce-scatter or an all-gather). ``own``, ``copy``: bytes of a device and of a
        copy of all layers of a stage.
        """
        inside, outside = self.kinds.predictor.network.least_s_per_byte(kind.name, kind.widths, replicas)
        rates = [(inside, own), (outside, np.maximum(copy, own))]
        known = [rate * size for rate, size in rates if rate < inf]
        return np.minimum.reduce(known) if known else np.where(own > 0, np.inf, 0.0)

    def _send_s(self, kind: Kind) -> float:
        """Lower bound on the seconds of a message to any other pipeline rank."""
        fleet = self.kinds.predictor.fleet
        wires, pool = Wires(fleet), fleet.pools[kind.pool]
        sent = min(kind.table.output_bytes(stop) for stop in range(1, len(kind.table.costs)))
        ways = [(wire, 1.0) for other in fleet.pools if (wire := wires.between(pool.name, other.name)) is not None]
        ways = [(wire, max(1.0, kind.devices / pool.devices_per_node)) for wire, _ in ways]
        inside = wires.inside(pool)
        ways += [] if inside is None else [(inside, float(kind.devices))]
        return min((wire.latency_s + sent / wire.bandwidth_bytes_per_s / part for wire, part in ways), default=inf)
