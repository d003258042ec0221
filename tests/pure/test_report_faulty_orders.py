"""A schedule that cannot run is drawn with the fault in sight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.plan import Action
from heterodyne.plan.schedules import SCHEDULES, Orders
from heterodyne.plan.schedules.check import order_faults
from heterodyne.report.faulty_orders import drawn_faults


@given(st.integers(1, 5), st.integers(1, 12), st.data(), st.integers(60, 200))
def test_a_missing_action_is_marked_beside_where_it_should_be(
    places: int, micro_batches: int, data: st.DataObject, width: int
) -> None:
    orders = SCHEDULES["GPipe"].orders(places, 1, micro_batches)
    place = data.draw(st.integers(0, places - 1))
    lost = data.draw(st.sampled_from(orders[place]))
    broken = tuple(tuple(a for a in row if a != lost) for row in orders)
    drawn = drawn_faults(broken, order_faults(broken, range(places), micro_batches), width)
    rows, told = drawn.splitlines()[:places], drawn.splitlines()[places:]
    assert max(map(len, rows)) <= width
    other = f"{place}{'F' if lost.kind == 'B' else 'B'}{lost.index}"
    assert [n for n, row in enumerate(rows) if ">" in row] == [place]
    assert f">{other}<" in rows[place]
    assert any(f"{lost} is missing" in line for line in told)


@pytest.mark.parametrize("at", [0, 500, 999])
def test_a_long_schedule_is_cut_around_the_fault_on_every_row_alike(at: int) -> None:
    orders = SCHEDULES["1F1B"].orders(2, 1, 1000)
    broken = (orders[0], tuple(a for a in orders[1] if str(a) != f"1B{at}"))
    drawn = drawn_faults(broken, order_faults(broken, (0, 1), 1000), 80).splitlines()
    assert f">1F{at}<" in drawn[1]
    assert len(drawn[0]) == len(drawn[1]) <= 80


def test_many_faults_are_counted() -> None:
    orders = SCHEDULES["GPipe"].orders(1, 1, 30)
    broken = (tuple(a for a in orders[0] if a.kind == "F"),)
    drawn = drawn_faults(broken, order_faults(broken, (0,), 30), 100).splitlines()
    assert drawn[-1] == "and 22 more"


ACTIONS = st.builds(
    Action, st.integers(0, 3), st.sampled_from(["F", "B", "I", "W", "R", "SEND_F", "REDUCE_GRAD"]), st.integers(0, 4)
)


@given(st.lists(st.lists(ACTIONS, max_size=8).map(tuple), max_size=4).map(tuple), st.integers(1, 3), st.integers(1, 3))
def test_whatever_is_wrong_can_be_drawn(orders: Orders, places: int, micro_batches: int) -> None:
    faults = order_faults(orders, range(places), micro_batches)
    drawn = drawn_faults(orders, faults, 80).splitlines()
    assert len(drawn) == len(orders) + min(len(faults), 8) + (len(faults) > 8)


def test_what_is_not_drawn_does_not_move_the_mark() -> None:
    orders = (tuple(map(Action.parse, ["0SEND_F0", "0F0", "0B0", "0B0"])),)
    faults = order_faults((orders[0][1:],), (0,), 1)
    shifted = [replace(fault, position=fault.position + 1) for fault in faults if fault.position is not None]
    assert "0F0" in drawn_faults(orders, shifted, 80)
    assert drawn_faults(orders, shifted, 80).splitlines()[0].split()[-2:] == [">0B0<", "="]
