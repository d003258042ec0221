"""The candidates of a search in sentences: the parts of a step, why alternatives are slower, and why nothing fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import inf

from heterodyne.cluster.fleet import Fleet
from heterodyne.cost.layers import Widths
from heterodyne.predictor.constants import constants
from heterodyne.search.explain import ratio_in_words
from heterodyne.search.fleet.fleet_wires import collectives
from heterodyne.search.fleet.kinds import Kind, kinds_of
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.plan import Candidate, TemplatePlan
from heterodyne.search.fleet.pool import CandidatePool
from heterodyne.search.fleet.search import Search
from heterodyne.search.fleet.tables import Memory
from heterodyne.search.shortfall import shortfall
from heterodyne.units import format_bytes, format_seconds

__all__ = ["host_exchange_in_words", "step_in_words", "unjoined_in_words", "why_more", "why_not"]

_MOST_TOLD = 3


def step_in_words(pool: CandidatePool) -> str:
    """The parts of the best plan's step time, and its gap to the lower bound."""
    own = pool.best.predicted
    gradients = f"gradients {format_seconds(own.sync_s)}, " if own.sync_s else ""
    said = (
        f"Of a step of {format_seconds(own.step_s)}, pipelines take {format_seconds(own.pipelines_s)}, {gradients}"
        f"the update {format_seconds(own.update_s)}. The most that a device holds is {format_bytes(own.peak_bytes)}."
    )
    if 0 < pool.bound_s <= own.step_s:
        said += f" Lower bound of this search: {format_seconds(pool.bound_s)}."
    if pool.stopped:
        said += " The time was over before the search was; this is the best that it had found."
    return said


def host_exchange_in_words(fleet: Fleet, plan: TemplatePlan) -> str:
    """How devices without a common collectives library communicate, and the bandwidth assumed; "" where all share one."""
    libraries: dict[str, dict[str, None]] = {}
    for pool in plan.devices:
        libraries.setdefault(collectives(fleet, pool), {})[fleet.pool(pool).kind] = None
    if len(libraries) < 2:
        return ""
    who = " and ".join(f"{', '.join(kinds)} ({library})" for library, kinds in libraries.items())
    return (
        f"{who} exchange tensors in this plan, and their libraries do not talk to each other: what goes between them passes through the "
        f"memory of the hosts and through sockets (gloo), predicted at {constants().stated.sockets:.0%} of the link's bandwidth. Measure "
        "that path before you buy, and state it with --links if it carries less."
    )


def unjoined_in_words(fleet: Fleet, plan: TemplatePlan) -> str:
    """Of a plan that leaves devices out, between which of them no link is known; "" where all are joined, or all take part."""
    if all(plan.devices.get(pool.name) == pool.devices for pool in fleet.pools):
        return ""
    pairs = [
        f"the nodes of {a.name}" if a is b else f"{a.name} and {b.name}"
        for a, b in combinations_with_replacement(fleet.pools, 2)
        if (a is not b or a.nodes > 1) and fleet.wire(a, b) is None
    ]
    if not pairs:
        return ""
    shown = [*pairs[:_MOST_TOLD], *([f"{len(pairs) - _MOST_TOLD} more pairs"] if len(pairs) > _MOST_TOLD else [])]
    return f"No link is known between {', between '.join(shown)}, so none of them work together: state it under 'links', or with --links."


def why_more(other: Candidate, best: Candidate, objective: Objective) -> str:
    """By how much a plan is worse, and which part of its step is the cause."""
    if other.plan == best.plan:
        return "the best plan is one of these"
    ours, theirs = best.predicted, other.predicted
    value = {
        "throughput": (theirs.step_s, ours.step_s, "time"),
        "money": (theirs.usd or 0.0, ours.usd or 0.0, "money"),
        "energy": (theirs.joules or 0.0, ours.joules or 0.0, "energy"),
        "memory": (theirs.peak_bytes, ours.peak_bytes, "memory"),
    }[objective.goal]
    ratio = value[0] / value[1] if value[1] > 0 else 1.0
    said = ratio_in_words(ratio) if objective.goal == "throughput" else f"{ratio - 1:+.1%} {value[2]}"
    parts = {
        "in pipelines": theirs.pipelines_s - ours.pipelines_s,
        "for gradients": theirs.sync_s - ours.sync_s,
        "for the update": theirs.update_s - ours.update_s,
    }
    where, most = max(parts.items(), key=lambda part: part[1])
    if most > 0:
        said += f": {format_seconds(most)} more {where}"
    if theirs.devices != ours.devices:
        said += f", on {theirs.devices} devices"
    return said


_STATE = {1: "the optimizer state", 2: "gradients", 3: "parameters"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _TightestStage:
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
    if search.pool.evaluated:
        if objective is not None and objective.usd_per_hour is not None:
            least = min(own.predicted.usd_per_hour or inf for own in search.pool.evaluated.values())
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
    return _in_words(nearest, search)


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


def _tightest(search: Search) -> Iterator[_TightestStage]:
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


def _evenly(kind: Kind, stages: int, size: int, pipelines: int, search: Search) -> _TightestStage:
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
    return _TightestStage(
        kind=kind,
        stage=number,
        stages=stages,
        micro_batch=size,
        recompute=again,
        pipelines=pipelines,
        memory=memory(*best[number], number),
    )


def _in_words(tight: _TightestStage, search: Search) -> str:
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
        f"{tight.micro_batch}; {_remedy(tight, search)}. With {_with_all_shared(tight, search)}"
    )


def _with_all_shared(tight: _TightestStage, search: Search) -> str:
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


def _remedy(tight: _TightestStage, search: Search) -> str:
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
