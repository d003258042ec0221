"""TaskGraphs: the parts of a model that its author has marked, each with how it shall be laid out on how many devices.

A TaskGraph is what one scope in forward encloses, or what a default strategy covers. Its ops need not be neighbours: a scope
inside of it takes some out of the middle. Ops without a mark belong to none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from heterodyne.graph.ir import ModelGraph

__all__ = ["Kind", "TaskGraph", "TaskGraphRun", "task_graph_runs"]

Kind = Literal["replicate", "split"]


@dataclass(frozen=True, kw_only=True)
class TaskGraph:
    """What one scope encloses, or one default strategy covers.

    Args:
        name: unique in the graph; the author's, or made of kind and count. Several of one name are numbered: ``split(4)#0``.
        kind: copies that share the samples, or one copy that is cut.
        device_count: over how many devices.
        source: "file.py:12" of the line that opens it.
        default: whether a default strategy made it, rather than a scope.
        section: how many default strategies came before the one in force, or the last that was: 0 up to the second.
        inside: name of the TaskGraph that it stands in: the scope around it, or the default strategy in force. None: of none,
            or of one without ops.
    """

    name: str
    kind: Kind
    device_count: int
    source: str = ""
    default: bool = False
    section: int = 0
    inside: str | None = None


@dataclass(frozen=True, kw_only=True)
class TaskGraphRun:
    """Ops ``[start, stop)``: the first and the last are of the TaskGraph, and none between them is of another."""

    task_graph: TaskGraph
    start: int
    stop: int


def task_graph_runs(graph: ModelGraph) -> tuple[TaskGraphRun, ...]:
    """The TaskGraphs in the order of the ops; one comes again where it goes on after another."""
    known = {task_graph.name: task_graph for task_graph in graph.task_graphs}
    runs: list[TaskGraphRun] = []
    for position, op in enumerate(graph.ops):
        task_graph = known.get(op.annotation or "")
        if task_graph is None:
            continue
        start = position
        if runs and runs[-1].task_graph is task_graph:
            start = runs.pop().start
        runs.append(TaskGraphRun(task_graph=task_graph, start=start, stop=position + 1))
    return tuple(runs)
