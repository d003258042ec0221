"""What others take of a host's cores, where its workers had to share them."""

from __future__ import annotations

import pytest

from heterodyne.measure.confirm import Cores, busy, taken_by_others


def cores(worked_s: float, idle_s: float, own_s: float) -> Cores:
    return Cores(worked_s=worked_s, idle_s=idle_s, own_s=own_s)


def test_what_no_worker_of_the_host_had_is_others() -> None:
    taken = taken_by_others(["a", "b", "a"], [cores(20, 0, 7), cores(40, 0, 40), cores(20, 0, 5)])
    assert taken == {"a": pytest.approx(0.4), "b": 0.0}
    assert busy(taken) == ["a is busy (40% of its cores are taken by others): the plan will be off"]


def test_where_cores_are_idle_nobody_is_in_the_way() -> None:
    taken = taken_by_others(["a"], [cores(60, 40, 10)])
    assert taken == {"a": 0.0}
    assert busy(taken) == []


def test_a_little_is_not_worth_a_word() -> None:
    assert busy(taken_by_others(["a"], [cores(100, 0, 95)])) == []


def test_no_time_is_no_share() -> None:
    assert taken_by_others(["a"], [cores(0, 0, 0)]) == {"a": 0.0}


def test_the_seconds_of_this_process_are_among_those_of_its_host() -> None:
    begun = Cores.now()
    while (seen := Cores.now().since(begun)).own_s < 0.2:
        pass
    assert seen.worked_s > 0
