"""The TaskGraphs of a trace, from the marks that `heterodyne.annotate` left on its ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from heterodyne.annotate import MARK, Mark
from heterodyne.graph import TaskGraph

__all__ = ["Annotations", "read_annotations"]


@dataclass(frozen=True, kw_only=True)
class Annotations:
    """The TaskGraphs in the order of their first ops, and for each op that is in one its name."""

    task_graphs: tuple[TaskGraph, ...]
    names: Mapping[fx.Node, str]


def read_annotations(ops: Iterable[fx.Node]) -> Annotations:
    """Give the TaskGraphs of the ops unique names: those that share one are numbered in order.

    A mark that is a text is somebody else's: it names ops and makes no TaskGraph of them.
    """
    found: dict[fx.Node, Mark | str | None] = {node: (node.meta.get("custom") or {}).get(MARK) for node in ops}
    marks = {mark["entry"]: mark for mark in found.values() if isinstance(mark, dict)}
    names = _unique(marks)
    return Annotations(
        task_graphs=tuple(
            TaskGraph(
                name=names[entry],
                kind=mark["kind"],
                device_count=mark["device_count"],
                source=mark["source"],
                default=mark["default"],
                section=mark["section"],
                inside=None if mark["inside"] is None else names.get(mark["inside"]),
            )
            for entry, mark in marks.items()
        ),
        names={
            node: names[mark["entry"]] if isinstance(mark, dict) else str(mark)
            for node, mark in found.items()
            if mark is not None
        },
    )


def _unique(marks: Mapping[int, Mark]) -> dict[int, str]:
    count = Counter(mark["name"] for mark in marks.values())
    used: Counter[str] = Counter()
    names: dict[int, str] = {}
    for entry, mark in marks.items():
        name = mark["name"]
        names[entry] = name if count[name] == 1 else f"{name}#{used[name]}"
        used[name] += 1
    return names
