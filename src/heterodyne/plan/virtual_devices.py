"""Which devices each TaskGraph runs on: the virtual devices of Whale.

TaskGraphs that share devices are a stage. The stages of a copy of the model take devices of their own, one after the other; as
many copies are made as the devices allow, and share the global batch. Only counts are looked at here: who gets which share is
reported by the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterodyne.errors import PlanError
from heterodyne.graph import TaskGraph

__all__ = ["VirtualDevice", "colocated", "virtual_devices"]


@dataclass(frozen=True, kw_only=True)
class VirtualDevice:
    """The devices of one stage in one copy of the model, and the TaskGraphs that share them, in the order of their first ops."""

    task_graphs: tuple[TaskGraph, ...]
    devices: tuple[str, ...]


def colocated(task_graphs: Sequence[TaskGraph]) -> tuple[tuple[TaskGraph, ...], ...]:
    """The stages: the TaskGraphs of each, in order.

    ``task_graphs`` come in the order of the ops, and again where one goes on after another (see `task_graph_runs`). One that is
    split and one that is replicated over equally many devices share them, if they follow each other or one stands in the
    other. Everything else opens the next stage, and so does whatever follows a new default strategy.

    Raises PlanError if a TaskGraph goes on after a later stage has begun.
    """
    known = {task_graph.name: task_graph for task_graph in task_graphs}
    stages: list[list[TaskGraph]] = []
    stage_of: dict[str, int] = {}
    before: TaskGraph | None = None
    for task_graph in task_graphs:
        if task_graph.name not in stage_of:
            if before is None or not _joins(task_graph, stages[-1], before, known):
                stages.append([])
            stages[-1].append(task_graph)
            stage_of[task_graph.name] = len(stages) - 1
        elif (stage := stage_of[task_graph.name]) != len(stages) - 1:
            raise _goes_back(task_graph, stages[stage + 1][0])
        before = task_graph
    return tuple(map(tuple, stages))


def virtual_devices(
    task_graphs: Sequence[TaskGraph], nodes: Mapping[str, str]
) -> tuple[tuple[VirtualDevice, ...], ...]:
    """For each copy of the model the devices of its stages. No TaskGraph, no copy.

    Each stage takes the next devices of the first node that has enough of them left, so that it stays in one node, or else the
    next ones of all. It goes copy by copy, so that the stages of a copy are near each other.

    Args:
        task_graphs: as `colocated` takes them.
        nodes: for each device of the cluster, in order, the node that it stands in.

    Raises PlanError if the counts do not divide the devices.
    """
    stages = colocated(task_graphs)
    if not stages:
        return ()
    counts = [stage[0].device_count for stage in stages]
    copies, left = divmod(len(nodes), sum(counts))
    if left or not copies:
        raise _does_not_divide(stages, len(nodes))
    free = list(nodes)
    placed: list[tuple[VirtualDevice, ...]] = []
    for _ in range(copies):
        copy = []
        for stage, count in zip(stages, counts, strict=True):
            taken = _next(free, nodes, count)
            free = [device for device in free if device not in taken]
            copy.append(VirtualDevice(task_graphs=stage, devices=taken))
        placed.append(tuple(copy))
    return tuple(placed)


def _joins(
    task_graph: TaskGraph, stage: Sequence[TaskGraph], before: TaskGraph, known: Mapping[str, TaskGraph]
) -> bool:
    """Return whether a TaskGraph shares the devices of the stage that ``before`` belongs to."""
    if task_graph.section != before.section:
        return False
    homes = {_home(member, known) for member in stage}
    return _home(task_graph, known) in homes or _share(task_graph, before)


def _home(task_graph: TaskGraph, known: Mapping[str, TaskGraph]) -> str:
    """The TaskGraph whose devices it has because it stands in it; else itself."""
    outer = known.get(task_graph.inside or "")
    return outer.name if outer is not None and _share(task_graph, outer) else task_graph.name


def _share(one: TaskGraph, other: TaskGraph) -> bool:
    return one.kind != other.kind and one.device_count == other.device_count


def _next(free: Sequence[str], nodes: Mapping[str, str], count: int) -> tuple[str, ...]:
    """The next devices, of one node if one has enough."""
    for node in dict.fromkeys(nodes[device] for device in free):
        here = [device for device in free if nodes[device] == node]
        if len(here) >= count:
            return tuple(here[:count])
    return tuple(free[:count])


def _goes_back(task_graph: TaskGraph, between: TaskGraph) -> PlanError:
    if task_graph.kind != between.kind:
        counts = f"{task_graph.device_count} or {between.device_count}"
        remedy = f"give both the same device count, {counts}, so that they share devices"
    else:
        remedy = (
            "leave that scope out, or open another TaskGraph after it (set_default_strategy, or a scope of its own)"
        )
    return PlanError(
        f"{_named(task_graph)} goes on after {_named(between)}, which takes devices of its own: a pipeline does not come back to an "
        f"earlier stage. Let one end before the other begins, or {remedy}"
    )


def _does_not_divide(stages: Sequence[Sequence[TaskGraph]], devices: int) -> PlanError:
    total = sum(stage[0].device_count for stage in stages)
    left = devices % total
    for stage in stages:
        if stage[0].device_count > left:
            break
        left -= stage[0].device_count
    count = stage[0].device_count
    others = total - count
    would_do = [c for c in range(1, devices - others + 1) if devices % (others + c) == 0]
    of_all = "" if len(stages) == 1 else f", all stages together {total}"
    counts = f"it would fit with a count of {_either(would_do)}" if would_do else "no other count of it would fit"
    multiples = _either([total * times for times in (1, 2, 3)])
    return PlanError(
        f"{_named(*stage)} takes {count} devices{of_all}, and there are {devices}: for copy {devices // total + 1} of the model only "
        f"{left} are left for it. Change the device counts ({counts}) or give the cluster another number of devices ({multiples}, ...)"
    )


def _either(counts: Sequence[int]) -> str:
    *first, last = map(str, counts)
    return f"{', '.join(first)} or {last}" if first else last


def _named(task_graph: TaskGraph, *others: TaskGraph) -> str:
    line = f" ({task_graph.source})" if task_graph.source else ""
    more = f" with {len(others)} on the same devices" if others else ""
    return f"TaskGraph {task_graph.name!r}{line}{more}"
