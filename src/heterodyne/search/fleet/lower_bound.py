"""A lower bound on the step time of any plan of a space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from math import inf

import numpy as np
from scipy.optimize import linprog

from heterodyne.cost.layers import Widths
from heterodyne.predictor.overlap import shown_s
from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.counts import Limits
from heterodyne.search.fleet.covering import Covering, Places
from heterodyne.search.fleet.fleet_wires import Wires
from heterodyne.search.fleet.kinds import Kind, StageKinds
from heterodyne.search.fleet.plan import Candidate

__all__ = ["Cover", "fractional_bound_s", "lower_bound_s"]

_COVERED = 256  # devices, up to which the bound of `Cover` comes near enough to plans to be worth its time
_CLOSE = 5e-3  # of a time, the part to which the bound is known


def lower_bound_s(kinds: StageKinds, limits: Limits, known: Candidate | None) -> float:
    """Seconds that no step is shorter than. ``known``: a plan."""
    least = fractional_bound_s(kinds, limits)
    cover = Cover.of(kinds, limits) if kinds.predictor.fleet.devices <= _COVERED else None
    return least if cover is None or known is None else max(least, cover.bound_s(known))


def fractional_bound_s(kinds: StageKinds, limits: Limits) -> float:
    """Seconds of a step in which no device is ever idle and layers are divided in fractions.

    No micro-batch is in two layers at once: under every schedule it goes forward through all and back. So in a step of T seconds those of a
    size take at most T in the mean, without the halves of backwards for which nothing waits. The devices then have work for T'(T) at least,
    by a linear program over how many micro-batches of a size each kind does of each layer. T' falls with T, so no step is shorter than the
    T that is its own T'. With little time for many devices stages have to be wide, which takes more device seconds.
    """
    work = _work_of(kinds, limits)
    low = work(inf)
    high = work(low)
    while high == inf and low < inf:
        found = work(2 * low)
        low, high = (2 * low, found) if found > 2 * low else (low, 2 * low)
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if work(middle) > middle else (low, middle)
    return low


def _work_of(kinds: StageKinds, limits: Limits) -> Callable[[float], float]:
    """Seconds for which the busiest pool has work, if a micro-batch may take so many in the mean; infinite if none does."""
    tables, sizes, fleet = kinds.predictor.tables, kinds.sizes, kinds.predictor.fleet
    layers = list(dict.fromkeys(tables.costs.layers))
    waited = 0.5 if kinds.space.splits else 1.0
    limited = limits.prices is not None and np.isfinite(limits.budget)
    prices = limits.prices if limits.prices is not None and limited else np.zeros(len(fleet.pools))
    rooms = np.append(limits.room.astype(float), limits.budget if limited else 1.0)
    columns, waits, equal = [], [], []
    for at, size in enumerate(sizes):
        for kind, (number, layer) in product(kinds.of(size), enumerate(layers)):
            cost = kind.table.costs[tables.costs.layers.index(layer)]
            own = np.zeros(len(rooms))
            own[[kind.pool, -1]] = kind.devices, kind.devices * prices[kind.pool]
            columns.append(own * (cost.forward_s + cost.backward_s))
            waits.append((at, cost.forward_s + waited * cost.backward_s))
            equal.append(at * len(layers) + number)
    if not columns:
        return lambda _: inf
    count, several = len(columns), len(sizes)
    used = np.zeros((len(rooms) + several, count + several + 1))
    used[: len(rooms), :count] = np.array(columns).T
    used[: len(rooms), -1] = -rooms
    used[len(rooms) + np.array([at for at, _ in waits]), np.arange(count)] = [wait for _, wait in waits]
    once = np.zeros((several * len(layers) + 1, used.shape[1]))
    once[equal, np.arange(count)] = 1.0
    for at, size in enumerate(sizes):
        once[at * len(layers) : (at + 1) * len(layers), count + at] = [
            -tables.costs.layers.count(own) for own in layers
        ]
        once[-1, count + at] = size
    whole = [0.0] * (len(once) - 1) + [float(kinds.predictor.global_batch)]
    goal = np.append(np.zeros(count + several), 1.0)

    def work(seconds: float) -> float:
        rows = used if seconds < inf else used[: len(rooms)]
        if seconds < inf:
            used[len(rooms) + np.arange(several), count + np.arange(several)] = -seconds
        found = linprog(goal, A_ub=rows, b_ub=np.zeros(len(rows)), A_eq=once, b_eq=whole)
        return float(found.fun) if found.status == 0 and found.fun else inf

    return work


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

    def bound_s(self, known: Candidate) -> float:
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
        hidden_by, software = backward + recomputed, predictor.software
        after = np.full(start.shape, np.inf)
        if not shared or 0 in space.zero:
            after = shown_s(2 * gradients, 0.0, hidden_by, software) + whole
        if shared and max(space.zero) > 0:
            after = np.minimum(after, shown_s(gradients, updated, hidden_by, software) + own / last)
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
