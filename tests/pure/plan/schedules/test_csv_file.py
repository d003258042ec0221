"""Schedule files in PyTorch's notation."""

from __future__ import annotations

from pathlib import Path

import pytest

from heterodyne.errors import PlanError
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.csv_file import computing, format_csv, load_csv, parse_csv


def test_what_is_written_is_read() -> None:
    for schedule in SCHEDULES.values():
        orders = schedule.orders(3, schedule.chunks or 1, 5)
        assert parse_csv(format_csv(orders)) == orders


def test_a_file_keeps_places_without_work(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(format_csv(((), *SCHEDULES["1F1B"].orders(2, 1, 1))))
    assert path.read_text(encoding="utf-8") == "\n0F0,0B0\n1F0,1B0\n"
    assert load_csv(path) == ((), *SCHEDULES["1F1B"].orders(2, 1, 1))


def test_empty_cells_are_waits_and_communication_can_be_left_out() -> None:
    rows = parse_csv("0F0,0SEND_F0,,,0RECV_B0,0B0\r\n,1RECV_F0, 1F0 ,1B0,1SEND_B0\r\n")
    assert [str(action) for action in rows[1]] == ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]
    assert computing(rows) == SCHEDULES["1F1B"].orders(2, 1, 1)


def test_what_has_no_meaning_here_is_left_out_and_overlaps_run_in_turn() -> None:
    (row,) = parse_csv("0UNSHARD,0F0,(0F1;3B0)OVERLAP_F_B,0RESHARD,0REDUCE_GRAD")
    assert " ".join(map(str, row)) == "0F0 0F1 3B0"


@pytest.mark.parametrize("cell", ["0X0", "F0", "0F", "(0F0;0Q1)OVERLAP_F_B", "1F0 2F0"])
def test_a_cell_that_is_no_action_is_named_with_its_place(cell: str) -> None:
    with pytest.raises(PlanError, match=r"mine\.csv:2: cell 3: .* is not an action"):
        parse_csv(f"0F0\n1F0,,{cell}\n", path="mine.csv")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.csv: cannot be read"):
        load_csv(tmp_path / "none.csv")
    (tmp_path / "odd.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(PlanError, match="not UTF-8"):
        load_csv(tmp_path / "odd.csv")
