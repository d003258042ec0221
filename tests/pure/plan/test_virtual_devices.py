"""Where TaskGraphs run: who shares devices, what is placed where, and which counts are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.errors import PlanError
from heterodyne.graph import TaskGraph
from heterodyne.plan.virtual_devices import colocated, virtual_devices


def replicated(name: str, count: int, *, section: int = 0, default: bool = False) -> TaskGraph:
    return TaskGraph(
        name=name, kind="replicate", device_count=count, source=f"{name}.py:1", section=section, default=default
    )


def split(name: str, count: int, *, section: int = 0, inside: str | None = None) -> TaskGraph:
    return TaskGraph(name=name, kind="split", device_count=count, source=f"{name}.py:1", section=section, inside=inside)


def stages(*task_graphs: TaskGraph) -> list[str]:
    return [" ".join(t.name for t in stage) for stage in colocated(task_graphs)]


def machines(*sizes: int) -> dict[str, str]:
    """Nodes of so many devices: from ``0`` on, in nodes ``a``, ``b``, ..."""
    nodes = [chr(ord("a") + node) for node, size in enumerate(sizes) for _ in range(size)]
    return {str(device): node for device, node in enumerate(nodes)}


def places(task_graphs: Sequence[TaskGraph], nodes: dict[str, str]) -> list[list[str]]:
    return [["".join(v.devices) for v in copy] for copy in virtual_devices(task_graphs, nodes)]


D = replicated("d", 4, default=True)
S = [split(f"s{k}", 4, inside="d") for k in range(3)]


def test_scopes_that_follow_each_other_are_stages() -> None:
    assert stages(replicated("a", 1), replicated("b", 1), replicated("c", 2)) == ["a", "b", "c"]
    assert stages(split("a", 4), split("b", 4)) == ["a", "b"]


def test_split_and_replicate_over_as_many_devices_share_them() -> None:
    assert stages(replicated("features", 8), split("classes", 8)) == ["features classes"]
    assert stages(split("a", 4), replicated("b", 4), split("c", 2)) == ["a b", "c"]
    assert stages(replicated("features", 8), split("classes", 4)) == ["features", "classes"]


def test_experts_in_a_default_are_one_stage() -> None:
    first, second, third = S
    assert stages(D, first, D, second, D, third, D) == ["d s0 s1 s2"]
    # Also where the default has no op between two of them, or none before the first.
    assert stages(D, first, second, third, D) == ["d s0 s1 s2"]
    assert stages(first, second, D, third) == ["s0 s1 d s2"]


def test_scopes_in_a_scope_share_its_devices() -> None:
    outer = replicated("outer", 2)
    first, second = split("first", 2, inside="outer"), split("second", 2, inside="outer")
    assert stages(replicated("before", 2), outer, first, second, outer, replicated("after", 2)) == [
        "before",
        "outer first second",
        "after",
    ]


def test_a_second_default_is_the_next_stage() -> None:
    later = replicated("e", 4, section=1, default=True)
    own = split("t", 4, section=1, inside="e")
    assert stages(D, S[0], D, later, own, later) == ["d s0", "e t"]
    # Whatever stands at the border: a scope of the old default next to the new one, or of the new one next to the old.
    assert stages(D, S[0], later, own) == ["d s0", "e t"]
    assert stages(D, own, later) == ["d", "t e"]
    assert stages(D, S[0], replace(own, inside=None)) == ["d s0", "t"]


def test_a_first_default_behind_a_scope_shares_its_devices() -> None:
    assert stages(split("embedding", 4), D) == ["embedding d"]


def test_a_stage_does_not_come_back() -> None:
    narrow = split("narrow", 2, inside="d")
    with pytest.raises(PlanError, match=r"'d' \(d\.py:1\) goes on after TaskGraph 'narrow' \(narrow\.py:1\).*4 or 2"):
        colocated((D, narrow, D))
    with pytest.raises(PlanError, match="leave that scope out"):
        colocated((D, replicated("r", 4), D))
    assert stages(D, narrow) == ["d", "narrow"]


def test_without_task_graphs_nothing_is_placed() -> None:
    assert virtual_devices((), machines(4)) == ()


def test_devices_that_are_left_over_make_copies() -> None:
    assert places([D, S[0], D], machines(4)) == [["0123"]]
    assert places([D, S[0], D], machines(4, 4)) == [["0123"], ["4567"]]
    assert places([replicated("a", 1), replicated("b", 1)], machines(6)) == [["0", "1"], ["2", "3"], ["4", "5"]]
    (copy,) = virtual_devices([D, S[0], D, S[1]], machines(4))
    assert [t.name for t in copy[0].task_graphs] == ["d", "s0", "s1"]


def test_a_copy_stays_in_a_node() -> None:
    two = [replicated("a", 1), replicated("b", 1)]
    assert places(two, machines(2, 2)) == [["0", "1"], ["2", "3"]]
    uneven = [replicated("a", 1), split("b", 3)]
    assert places(uneven, machines(4, 4)) == [["0", "123"], ["4", "567"]]


def test_a_stage_stays_in_a_node_where_one_has_room() -> None:
    assert places([replicated("a", 1), replicated("b", 2)], machines(2, 2, 2)) == [["0", "23"], ["1", "45"]]
    assert places([replicated("a", 4)], machines(3, 5)) == [["3456"], ["0127"]]


@pytest.mark.parametrize(
    ("counts", "devices", "told"),
    [
        (
            (4,),
            6,
            r"'t0' \(t0\.py:1\) takes 4 devices, and there are 6.*copy 2.*only 2 are left.*a count of 1, 2, 3 or 6\)",
        ),
        ((4,), 2, r"takes 4 devices, and there are 2.*copy 1.*a count of 1 or 2\).*\(4, 8 or 12, \.\.\.\)"),
        ((2, 1), 4, r"'t0'.*all stages together 3.*copy 2.*only 1 are left"),
        ((2, 2), 6, r"'t1' .*all stages together 4.*copy 2.*only 0 are left.*a count of 1 or 4\)"),
        ((4, 4), 4, r"'t1' .*only 0 are left.*no other count of it would fit"),
        ((1,), 0, "there are 0"),
    ],
)
def test_counts_that_do_not_divide_the_devices_are_refused(counts: tuple[int, ...], devices: int, told: str) -> None:
    task_graphs = [replicated(f"t{k}", count) for k, count in enumerate(counts)]
    with pytest.raises(PlanError, match=told):
        virtual_devices(task_graphs, machines(devices))


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 4),
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
)
def test_every_device_has_one_place(counts: list[int], copies: int, sizes: list[int]) -> None:
    task_graphs = [replicated(f"t{k}", count) for k, count in enumerate(counts)]
    total = copies * sum(counts)
    nodes = dict(list(machines(*sizes * total).items())[:total])
    placed = virtual_devices(task_graphs, nodes)
    assert len(placed) == copies
    assert [[len(v.devices) for v in copy] for copy in placed] == [counts] * copies
    assert sorted(d for copy in placed for v in copy for d in v.devices) == sorted(nodes)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_no_task_graph_leaves_a_node_that_holds_whole_ones(count: int, a_node: int, copies: int) -> None:
    task_graphs = [replicated(f"t{k}", count) for k in range(a_node)]
    nodes = machines(*[count * a_node] * copies)
    for copy in virtual_devices(task_graphs, nodes):
        for virtual in copy:
            assert len({nodes[device] for device in virtual.devices}) == 1
