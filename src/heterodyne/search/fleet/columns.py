"""Selection of the templates that matter: those of the highest reduced value at some step times, and the best as alike pipelines.

The reduced value of a template is the samples that it does in a given time, less what its devices are worth elsewhere: the dual prices
of the relaxed knapsack (`counts`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heterodyne.search.fleet.arrays import Floats, Ints
from heterodyne.search.fleet.counts import Limits, best_per_devices, capacities, relaxed
from heterodyne.search.fleet.options import Options
from heterodyne.search.fleet.plan import Template
from heterodyne.search.fleet.predict import Predictor

__all__ = ["Columns"]

_ALONE = 3  # shapes for each number of pipelines that are all alike; twice as many where there are few devices
_ONE_BY_ONE = 8  # numbers of pipelines up to which every number is tried


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Selects templates.

    Args:
        sizes: micro-batch sizes.
        most: about how many templates each criterion selects.
        few: whole numbers of devices matter, so more templates are selected.
        ways: pairs of the fraction of the gradient sync that is counted and the factor on the step time at which templates are compared.
    """

    predictor: Predictor
    sizes: tuple[int, ...]
    most: int
    few: bool
    ways: tuple[tuple[float, float], ...]

    def of(self, options: Options, limits: Limits, seconds: float, *, filled: bool = True) -> list[Template]:
        """The templates of the highest reduced value if pipelines have ``seconds``, or a little more.

        ``filled``: pipeline fill and drain count once; otherwise pipelines are taken as never idle.
        """
        longest, sizes, devices = options.longest_s, options.sizes, options.devices
        exchange_s = options.exchange_s(limits)
        chosen: dict[int, None] = {}
        several = self.most // 4
        each = max(1, several // len(options.rows))
        for extra, later in self.ways:
            at_s = later * (seconds + extra * float(exchange_s.min()))
            once_s = (options.total_s if filled else longest) + extra * exchange_s
            capacity = capacities(longest, once_s, sizes, at_s)
            if later > 1:
                capacity = np.floor(capacity / sizes) * sizes
            keep: Ints = best_per_devices(capacity, devices, most=2)
            known = relaxed(capacity[keep], devices[keep], limits)
            if known is None:
                continue
            worth = capacity - devices @ known.prices
            per_device = worth / np.maximum(1, devices.sum(axis=1))
            for value in (worth, per_device):
                chosen.update(dict.fromkeys(_first(keep, value, several)))
                for size in self.sizes if self.few else ():
                    own = np.flatnonzero(sizes == size)
                    best = own[best_per_devices(capacity[own], devices[own])]
                    chosen.update(dict.fromkeys(_first(best, value, each)))
            if not self.few:
                chosen.update(dict.fromkeys(_filling(keep, capacity, devices, limits)))
        chosen.update(dict.fromkeys(self._alone(options, limits)))
        return options.templates(chosen)

    def _alone(self, options: Options, limits: Limits) -> list[int]:
        """The templates with the fastest step as alike pipelines."""
        most = limits.most_of(options.devices)
        exchange_s = options.exchange_s(limits)
        found: dict[int, None] = {}
        count = limits.least
        shapes = 2 * _ALONE if self.few else _ALONE
        while count <= int(most.max()):
            fits = np.flatnonzero(most >= count)
            rounds: Floats = np.ceil(self.predictor.global_batch / (options.sizes[fits] * count))
            once_s = options.total_s[fits] + (exchange_s[fits] if count > 1 else 0.0)
            step_s = once_s + (rounds - 1) * options.longest_s[fits]
            best = fits[np.argsort(step_s, kind="stable")[:shapes]]
            found.update(dict.fromkeys(best.tolist()))
            count = count + 1 if count < _ONE_BY_ONE else 2 * count
        return list(found)


def _filling(keep: Ints, capacity: Floats, devices: Ints, limits: Limits) -> list[int]:
    """Of the templates over a single pool, the best for each small device count that divides the pool."""
    found = []
    for pool, room in enumerate(limits.room.tolist()):
        own = keep[(devices[keep, pool] > 0) & (devices[keep, pool] == devices[keep].sum(axis=1))]
        times = room // np.maximum(1, devices[own, pool])
        for count in range(1, _ONE_BY_ONE + 1):
            alike = own[times == count]
            if len(alike) and capacity[alike].max() > 0:
                found.append(int(alike[capacity[alike].argmax()]))
    return found


def _first(rows: Ints, value: Floats, count: int) -> list[int]:
    """Those with the largest values."""
    order = np.argsort(-value[rows], kind="stable")[:count]
    return [int(row) for row in rows[order]]
