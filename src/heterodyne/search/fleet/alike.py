"""Enumeration of plans whose pipelines are all alike: every order of device kinds, number of stages and width, ranked by estimated step
time.

The stages of one kind are contiguous. In a time tau a stage of kind k takes floor(tau / t_k) layers, or as many as its memory holds at
its pipeline rank, so the bottleneck stage takes the least tau in which the stages take all layers: found by bisection, vectorised over
all pipelines. Pipeline fill, point-to-point messages and exposed gradient sync are added. It is an estimate: it selects the pipelines
that are cut exactly and played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, permutations, product
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.counts import Limits
from heterodyne.search.fleet.cutter import Places
from heterodyne.search.fleet.fleet_wires import Wires
from heterodyne.search.fleet.kinds import Kind
from heterodyne.search.fleet.options import exposed_sync_s
from heterodyne.search.fleet.plan import SPLIT
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space

__all__ = ["Alike"]

_BISECTIONS = 12
_NO_TIME_S = 1e-12  # of a layer that costs nothing
_NUMBERS = 32  # that are worked out for each pipeline
_PART = 4096  # pipelines that are worked out at once


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Alike pipelines of one search space. ``zero``: the ZeRO level at which memory is counted."""

    predictor: Predictor
    space: Space
    zero: int
    limits: Limits

    def best(
        self, kinds: Mapping[int, Sequence[Kind]], most: int, *, by_pools: bool = False
    ) -> list[tuple[int, Places]]:
        """The ``most`` plans with the least estimated step time, as pairs of micro-batch size and stages, the fastest first.

        Args:
            kinds: stage kinds, by micro-batch size.
            by_pools: so many over each set of pools, in one order of these.
        """
        found: dict[int, list[tuple[float, int, Places]]] = {}
        for size, own in kinds.items():
            below = {pools: known[-1][0] for pools, known in found.items() if len(known) >= most}
            limit = self.space.cells // (_NUMBERS * len(kinds))
            for pools, seconds, places in self._of_size(own, size, most, below, limit, by_pools=by_pools):
                found.setdefault(pools, []).append((seconds, size, places))
            found = {pools: sorted(known, key=itemgetter(0))[:most] for pools, known in found.items()}
        return [(size, places) for _, size, places in sorted(chain(*found.values()), key=itemgetter(0))]

    def _of_size(
        self, kinds: Sequence[Kind], size: int, most: int, known: Mapping[int, float], limit: int, *, by_pools: bool
    ) -> Iterator[tuple[int, float, Places]]:
        """Plans of one micro-batch size with an estimate below that ``known`` for their pools (a bit mask; 0: all are one set). Only those
        are estimated exactly whose relaxation, equally long stages with fractional layers, could be among them.
        """
        if not kinds:
            return
        chains, runs = self._chains(kinds, limit, combinations if by_pools else permutations)
        count = self._count(kinds, chains, runs)
        forward, backward, _ = _passes(kinds)
        rounds = np.ceil(self.predictor.global_batch / (size * np.maximum(1, count)))
        pace = 1 / np.maximum(forward + backward, _NO_TIME_S)
        rounds += self._filling(kinds) * (runs.sum(axis=1) - 1)
        least = np.where(count > 0, rounds / (runs * pace[chains]).sum(axis=1), np.inf)
        bits = 1 << np.array([kind.pool for kind in kinds])
        pools, of = np.unique(np.where(runs > 0, bits[chains], 0).sum(axis=1) * by_pools, return_inverse=True)
        below = np.array([known.get(own, np.inf) for own in pools.tolist()])
        order = np.argsort(least, kind="stable")
        at, about = order[:0], least[:0]
        for first in range(0, len(order), _PART):
            part = order[first : first + _PART]
            if least[part[0]] >= below.max():
                break
            part = part[least[part] < below[of[part]]]
            at = np.concatenate([at, part])
            about = np.concatenate([about, self._about_s(kinds, size, chains[part], runs[part], count[part])])
            ranked = np.lexsort((about, of[at]))
            at, about = at[ranked], about[ranked]
            place = np.arange(len(at)) - np.searchsorted(of[at], of[at])
            last = place == most - 1
            below[of[at[last]]] = np.minimum(below[of[at[last]]], about[last])
            at, about = at[place < most], about[place < most]
        for number, seconds in zip(at.tolist(), about.tolist(), strict=True):
            if seconds < np.inf:
                stages = zip(chains[number].tolist(), runs[number].tolist(), strict=True)
                places = tuple((kinds[k].name, kinds[k].widths, run) for k, run in stages if run)
                yield int(pools[of[number]]), seconds, places

    def _filling(self, kinds: Sequence[Kind]) -> float:
        """The part of a micro-batch for which each stage but one makes the others wait. Where backwards are halved, one that waits for its
        first forward does what others have left over at the end.
        """
        forward, backward, _ = _passes(kinds)
        return 1.0 if SPLIT.isdisjoint(self.space.schedules) else float(np.mean(forward / (forward + backward)))

    def _chains(
        self, kinds: Sequence[Kind], limit: int, orders_of: Callable[..., Iterable[tuple[int, ...]]]
    ) -> tuple[Ints, Ints]:
        """Sequences of kinds with the number of stages of each; 0 pads the unused places. Shape [pipelines, max_pools].

        ``orders_of``: pools that there are of so many; those with most memory are ahead, where most micro-batches are in flight.
        """
        pools = sorted({kind.pool for kind in kinds}, key=lambda pool: -self.predictor.fleet.pools[pool].memory_bytes)
        of = {pool: [n for n, kind in enumerate(kinds) if kind.pool == pool] for pool in pools}
        wide = min(self.space.max_pools, len(pools))
        orders = {
            count: [own for some in orders_of(pools, count) for own in product(*(of[p] for p in some))]
            for count in range(1, wide + 1)
        }
        stages = min(self.space.max_stages, len(kinds[0].table.costs))
        for digits in range(stages.bit_length(), 0, -1):
            grids = {count: _numbers(stages, digits, count) for count in orders}
            if sum(len(made) * len(grids[count]) for count, made in orders.items()) <= limit:
                break
        chains, runs = [], []
        for count, made in orders.items():
            missing = ((0, 0), (0, wide - count))
            chains.append(np.pad(np.repeat(np.array(made), len(grids[count]), axis=0), missing))
            runs.append(np.pad(np.tile(grids[count], (len(made), 1)), missing))
        return np.concatenate(chains), np.concatenate(runs)

    def _count(self, kinds: Sequence[Kind], chains: Ints, runs: Ints) -> Ints:
        """The number of pipeline replicas that the limits allow; 0 where there are too few devices."""
        devices, pool = (np.array([getattr(kind, name) for kind in kinds]) for name in ("devices", "pool"))
        need = np.zeros((len(chains), len(self.limits.room)), dtype=np.int64)
        for own, run in zip(chains.T, runs.T, strict=True):
            need[np.arange(len(chains)), pool[own]] += run * devices[own]
        count = self.limits.most_of(need)
        return np.where(count >= self.limits.least, count, 0)

    def _about_s(self, kinds: Sequence[Kind], size: int, chains: Ints, runs: Ints, count: Ints) -> Floats:
        """Estimated seconds of a step of each plan. Shape [pipelines]."""
        layers = len(kinds[0].table.costs)
        forward, backward, recomputed = (own / layers for own in _passes(kinds))
        inside, before = self._sends(kinds, chains, runs)
        after = np.pad(before[:, 1:], ((0, 0), (0, 1)))
        waits = np.where(runs > 1, inside + np.maximum(inside, np.maximum(before, after)), before + after)
        joined: NDArray[np.bool_] = np.all(np.isfinite(waits), axis=1)
        overlap = self.predictor.software.overlap_sends
        waits = np.zeros(waits.shape) if overlap else np.where(joined[:, None], waits, 0.0)
        rounds = np.ceil(self.predictor.global_batch / (size * count))
        behind = runs.sum(axis=1, keepdims=True) - np.cumsum(runs, axis=1)
        held = np.minimum(behind + (runs + 1) / 2, rounds[:, None])  # by the stages of a kind, about
        plain, again = (self._room(kinds, chains, held, count, recompute=recompute) for recompute in (False, True))
        each, more = np.maximum(forward + backward, _NO_TIME_S)[chains], recomputed[chains]
        low, high = np.zeros(len(chains)), (each + more).max(axis=1) * layers + waits.max(axis=1)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            left = np.maximum(0.0, middle[:, None] - waits)
            done = np.maximum(np.minimum(left // each, plain), np.minimum(left // (each + more), again))
            enough = (runs * done).sum(axis=1) >= layers
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        fits = joined & ((runs * np.maximum(plain, again)).sum(axis=1) >= layers)
        sent = 2 * (inside * np.maximum(0, runs - 1) + before).sum(axis=1) if overlap else 0.0
        shown = self._shown_s(kinds, chains, runs, count, high)
        about: Floats = high * (rounds + self._filling(kinds) * (runs.sum(axis=1) - 1)) + sent + shown
        return np.where(fits, about, np.inf)

    def _room(self, kinds: Sequence[Kind], chains: Ints, held: Floats, count: Ints, *, recompute: bool) -> Floats:
        """The number of layers for which a stage has memory, if every layer is like one in the middle of the model."""
        if recompute and not self.space.recompute:
            return np.zeros(chains.shape)
        figures = []
        for kind in kinds:
            middle = len(kind.table.costs) // 2
            own = kind.table.memory(middle, middle + 1, recompute=recompute, held=1, replicas=2, zero=self.zero)
            parts = list(zip((own.optimizer, own.gradients, own.parameters), (1, 2, 3), strict=True))
            shared = 2 * sum(part for part, level in parts if self.zero >= level)
            whole = sum(part for part, level in parts if self.zero < level)
            figures.append((kind.memory_bytes - own.passing, whole, shared, own.activations))
        most, whole, shared, each = np.array(figures).T
        need = whole[chains] + shared[chains] / count[:, None] + held * each[chains]
        found: Floats = np.maximum(0, most[chains] // np.maximum(need, 1.0))
        return found

    def _sends(self, kinds: Sequence[Kind], chains: Ints, runs: Ints) -> tuple[Floats, Floats]:
        """Seconds of a point-to-point message between two stages of one kind, and from the preceding kind. Shape [pipelines, max_pools]."""
        fleet, wires = self.predictor.fleet, Wires(self.predictor.fleet)
        pools = [fleet.pools[kind.pool] for kind in kinds]
        sent = kinds[0].table.output_bytes(len(kinds[0].table.costs) // 2)
        devices, per_node = np.array([kind.devices for kind in kinds]), np.array([p.devices_per_node for p in pools])
        part = np.minimum(1.0, runs * devices[chains] / per_node[chains])  # of a node's link
        latency, rate = np.full((2, len(kinds), len(kinds)), np.inf)
        near = np.full(len(kinds), np.inf)
        for a, own in enumerate(pools):
            within = wires.inside(own)
            near[a] = (
                np.inf if within is None else within.latency_s + sent / kinds[a].devices / within.bandwidth_bytes_per_s
            )
            for b, other in enumerate(pools):
                wire = wires.between(own.name, other.name)
                if wire is not None:
                    latency[a, b], rate[a, b] = wire.latency_s, sent / wire.bandwidth_bytes_per_s
        inside = np.where(
            runs * devices[chains] <= per_node[chains],
            near[chains],
            latency[chains, chains] + rate[chains, chains] / np.maximum(part, 1e-9),
        )
        before = np.zeros(inside.shape)
        one, two = chains[:, :-1], chains[:, 1:]
        before[:, 1:] = latency[one, two] + rate[one, two] / np.maximum(1e-9, np.minimum(part[:, :-1], part[:, 1:]))
        return np.where(runs > 1, inside, 0.0), np.where(runs > 0, before, 0.0)

    def _shown_s(self, kinds: Sequence[Kind], chains: Ints, runs: Ints, count: Ints, tau: Floats) -> Floats:
        """Estimated exposed seconds of gradient sync, if each stage holds layers in proportion to its speed."""
        layers, wires = len(kinds[0].table.costs), Wires(self.predictor.fleet)
        each = []
        for kind in kinds:
            wire = wires.between(kind.name, kind.name)
            size = kind.table.reduced_bytes(0, layers) / layers
            each.append(0.0 if wire is None else size / wire.bandwidth_bytes_per_s)
        pace, each_s = 1 / np.maximum(sum(_passes(kinds)[:2]), _NO_TIME_S), np.array(each)
        own = runs * pace[chains]
        part = layers * pace[chains] / own.sum(axis=1, keepdims=True)  # of the layers, on a stage
        once = np.where(runs > 0, part * each_s[chains], 0.0).max(axis=1) * (1 - 1 / count)
        return exposed_sync_s(self.predictor, once, once, tau)


def _passes(kinds: Sequence[Kind]) -> tuple[Floats, Floats, Floats]:
    """Seconds of all forwards, backwards and recompute of a micro-batch, on each kind."""
    forward, backward, again = np.array([[own[-1] for own in kind.table.passes] for kind in kinds]).T
    return forward, backward, again


def _numbers(most: int, digits: int, count: int) -> Ints:
    """So many numbers of stages, at most ``most`` together: all that have so many binary digits and zeros behind them.

    Shape [ways, count].
    """
    one = sorted(
        {n << shift for n in range(1, 1 << digits) for shift in range(most.bit_length()) if n << shift <= most}
    )
    grid = np.stack(np.meshgrid(*[np.array(one)] * count, indexing="ij"), axis=-1).reshape(-1, count)
    found: Ints = grid[grid.sum(axis=1) <= most]
    return found
