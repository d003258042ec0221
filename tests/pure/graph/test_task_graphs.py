"""TaskGraphs of a graph that is made by hand: where they run, and what of them the fingerprint sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from heterodyne.graph import ModelGraph, TaskGraph, task_graph_runs
from pure.build import graph

REPLICATED = TaskGraph(name="r", kind="replicate", device_count=4, source="model.py:3", default=True)
SPLIT = TaskGraph(name="s", kind="split", device_count=4, source="model.py:7", inside="r")


def annotated(names: Sequence[str | None], *task_graphs: TaskGraph) -> ModelGraph:
    """A chain of as many ops as there are names, and of no less than two."""
    plain = graph((len(names) - 2) // 2)
    ops = tuple(replace(op, annotation=name) for op, name in zip(plain.ops, names, strict=True))
    return replace(plain, ops=ops, task_graphs=task_graphs)


def runs(names: Sequence[str | None]) -> list[tuple[str, int, int]]:
    found = task_graph_runs(annotated(names, REPLICATED, SPLIT))
    return [(run.task_graph.name, run.start, run.stop) for run in found]


def test_a_task_graph_that_goes_on_after_another_comes_again() -> None:
    assert runs(["r", "s", "s", "r", "s", "r"]) == [("r", 0, 1), ("s", 1, 3), ("r", 3, 4), ("s", 4, 5), ("r", 5, 6)]


def test_ops_of_none_break_no_run() -> None:
    assert runs([None, "r", None, "r", None, "s"]) == [("r", 1, 4), ("s", 5, 6)]
    assert runs([None, None]) == []


def test_a_name_that_no_task_graph_has_is_no_task_graph() -> None:
    assert runs(["wide", "wide", "s", "wide"]) == [("s", 2, 3)]


def test_the_fingerprint_leaves_out_lines() -> None:
    names = ["r", "r", "s", "r"]
    first = annotated(names, REPLICATED, SPLIT)
    moved = annotated(names, replace(REPLICATED, source="model.py:99"), replace(SPLIT, source=""))
    assert first.fingerprint == moved.fingerprint


@pytest.mark.parametrize(
    "other", [replace(SPLIT, device_count=2), replace(SPLIT, kind="replicate"), replace(SPLIT, section=1)]
)
def test_the_fingerprint_tells_what_is_marked(other: TaskGraph) -> None:
    names = ["r", "r", "s", "r"]
    plain = annotated([None] * 4)
    first, second = (annotated(names, REPLICATED, task_graph) for task_graph in (SPLIT, other))
    assert len({plain.fingerprint, first.fingerprint, second.fingerprint}) == 3
