"""Why nothing fits: the stage that is nearest to fitting, what fills it, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.kinds import Kind, kinds_of
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.search import Search
from heterodyne.search.fleet.tables import Memory
from heterodyne.search.shortfall import shortfall
from heterodyne.units import format_bytes

__all__ = ["why_not"]

_STATE = {1: "the optimizer state", 2: "gradients", 3: "parameters"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tight:
    """A stage that does not fit, of the pipeline in which the fullest one lacks least."""

    kind: Kind
    stage: int
    stages: int
    micro_batch: int
    recompute: bool
    pipelines: int
    memory: Memory

    @property
    def filled(self) -> float:
        return self.memory.total / self.kind.memory_bytes


def why_not(search: Search, objective: Objective | None = None) -> str:
    """A sentence on why the search space has no feasible plan."""
    if not search.kinds.sizes:
        return "the costs of the layers are not known for any device of the fleet at any size of micro-batch"
    if search.evaluated:
        if objective is not None and objective.usd_per_hour is not None:
            least = min((w.predicted.usd_per_hour or inf for w in search.evaluated.values()), default=inf)
            return (
                f"no plan keeps the budget of {objective.usd_per_hour:.2f} usd/hour: the cheapest that was found costs "
                f"{least:.2f} usd/hour"
            )
        return "no plan that was found keeps the limits"
    nearest = min(_tightest(search), key=lambda tight: tight.filled, default=None)
    if nearest is None:
        return "the costs of the layers are known for none of the widths that fill the nodes of the fleet"
    if nearest.filled <= 1:
        if objective is not None and objective.usd_per_hour is not None:
            return _too_dear(objective.usd_per_hour, search)
        return (
            f"no links are known that join enough devices: pipelines of {nearest.stages} stages would fit the memory of "
            f"{nearest.kind.name}; state the links between its nodes"
        )
    return _told(nearest, search)


def _too_dear(budget: float, search: Search) -> str:
    """The lowest price of the devices of a pipeline that fits."""
    costs = {}
    for tight in _tightest(search):
        price = search.fleet.pools[tight.kind.pool].usd_per_device_hour
        if tight.filled <= 1 and price is not None:
            count = tight.stages * tight.kind.devices
            costs[price * count] = f"{count} of {tight.kind.name}"
    told = f"; {costs[min(costs)]}, which would do, cost {min(costs):.2f} usd/hour" if costs else ""
    return f"no plan keeps the budget of {budget:.2f} usd/hour{told}"


def _tightest(search: Search) -> Iterator[_Tight]:
    """For each device kind and micro-batch size: as many stages as allowed, with bytes divided as evenly as possible."""
    space = search.space
    for size in search.kinds.sizes:
        for kind in kinds_of(search.fleet, search.tables, size, space):
            layers = len(kind.table.costs)
            devices = search.fleet.pools[kind.pool].devices
            most = min(layers, space.max_stages, devices // kind.devices)
            pipelines = min(max(1, devices // (kind.devices * most)), space.max_pipelines or devices)
            for stages in sorted({1, most}):
                yield _evenly(kind, stages, size, pipelines, search)


def _evenly(kind: Kind, stages: int, size: int, pipelines: int, search: Search) -> _Tight:
    """The fullest stage of the cut whose fullest stage is least full, by bisection."""
    layers = len(kind.table.costs)
    again = search.space.recompute
    held_at_most = max(1, search.predictor.global_batch // size)

    def memory(start: int, stop: int, number: int) -> Memory:
        held = min(stages - number, held_at_most)
        ways = (
            kind.table.memory(start, stop, recompute=again, held=held, replicas=pipelines, zero=zero)
            for zero in search.space.zero
        )
        return min(ways, key=lambda memory: memory.total)

    def cut(limit: float) -> list[tuple[int, int]] | None:
        spans, start = [], 0
        for number in range(stages):
            last = layers - (stages - number - 1)
            stop = start + 1
            while stop < last and memory(start, stop + 1, number).total <= limit:
                stop += 1
            if memory(start, stop, number).total > limit:
                return None
            spans.append((start, stop))
            start = stop
        return spans if start == layers else None

    low, high = 0.0, 2 * memory(0, layers, 0).total * stages + 1
    best = cut(high)
    for _ in range(40):
        middle = (low + high) / 2
        found = cut(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    assert best is not None  # everything fits into the upper limit
    number = max(range(stages), key=lambda n: memory(*best[n], n).total)
    return _Tight(
        kind=kind,
        stage=number,
        stages=stages,
        micro_batch=size,
        recompute=again,
        pipelines=pipelines,
        memory=memory(*best[number], number),
    )


def _told(tight: _Tight, search: Search) -> str:
    memory = tight.memory
    parts = {
        "activations": memory.activations,
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "working memory": memory.passing,
    }
    largest = sorted(parts.items(), key=lambda part: -part[1])[:2]
    needs = " and ".join(f"{format_bytes(size)} {name}" for name, size in largest)
    width = f" ({tight.kind.widths.in_words})" if tight.kind.devices > 1 else ""
    return (
        f"needs {format_bytes(memory.total)} on {tight.kind.name}{width} in stage {tight.stage} of {tight.stages}, where "
        f"a plan may fill {format_bytes(tight.kind.memory_bytes)} of a device: {needs} at micro-batch "
        f"{tight.micro_batch}; {_remedy(tight, search)}. With {_shared_out(tight, search)}"
    )


def _shared_out(tight: _Tight, search: Search) -> str:
    """What all devices of the fleet lack together."""
    costs = search.tables.costs
    kind = search.fleet.pools[tight.kind.pool].kind
    known = [costs.cost(kind, layer, Widths(), tight.micro_batch) for layer in costs.layers]
    state = sum(each.parameter_bytes + each.state_bytes for each in known if each is not None)
    rooms: dict[str, tuple[int, int]] = {}
    for pool in search.fleet.pools:
        count, least = rooms.get(pool.kind, (0, pool.memory_bytes))
        rooms[pool.kind] = (count + pool.devices, min(least, pool.memory_bytes))
    least = min(each.parameter_bytes for each in known if each is not None)
    return shortfall(rooms, on_devices=state, on_hosts=0, least=max(1, least))


def _remedy(tight: _Tight, search: Search) -> str:
    """Which limits of the space could be widened."""
    space = search.space
    ways = []
    if not space.recompute and tight.memory.activations > tight.memory.total / 4:
        ways.append("recompute")
    if tight.micro_batch > 1 and tight.memory.activations > tight.memory.total / 4:
        ways.append("micro-batch 1")
    parts = {1: tight.memory.optimizer, 2: tight.memory.gradients, 3: tight.memory.parameters}
    if tight.pipelines * tight.kind.widths.copies > 1:
        ways += [
            f"sharding {_STATE[level]} over replicas (ZeRO-{level})"
            for level, size in parts.items()
            if level > max(space.zero) and size > tight.memory.total / 8
        ]
    if space.max_stages < len(tight.kind.table.costs):
        ways.append("more stages")
    return f"try {' or '.join(ways)}" if ways else "it takes more devices, or devices with more memory"
