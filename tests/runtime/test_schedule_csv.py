"""Schedules and their files against PyTorch's own, which are made by other code from the same papers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from heterodyne.plan.export import EvenPlan, pytorch_takes, torchtitan_toml
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.check import order_faults
from heterodyne.plan.schedules.csv_file import computing, format_csv, load_csv, parse_csv

SHAPES = [(2, 4), (4, 4), (4, 8), (4, 10), (3, 7), (8, 32), (5, 2)]


def stages(places: int, chunks: int) -> list[Any]:
    """What PyTorch's schedules want to know of the stages of rank 0; nothing is run."""
    return [
        SimpleNamespace(
            submod=None,
            num_stages=places * chunks,
            group_size=places,
            group_rank=0,
            group=None,
            stage_index=chunk * places,
            is_last=False,
            is_first=chunk == 0,
            has_backward=True,
        )
        for chunk in range(chunks)
    ]


def their_schedule(name: str, places: int, chunks: int, micro_batches: int) -> Any:
    made = theirs.get_schedule_class(name)
    return made(stages(places, chunks), micro_batches)


def as_text(schedule: Any) -> str:
    return "\n".join(",".join("" if a is None else str(a) for a in row) for row in schedule.pipeline_order.values())


@pytest.mark.parametrize(("places", "micro_batches"), SHAPES)
@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 3),
        ("InterleavedZeroBubble", 1),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ],
)
def test_named_schedules_are_those_of_pytorch(name: str, chunks: int, places: int, micro_batches: int) -> None:
    try:
        expected = their_schedule(name, places, chunks, micro_batches)
    except ValueError:  # they do not take every number of micro-batches; here any number runs
        orders = SCHEDULES[name].orders(places, chunks, micro_batches)
        assert order_faults(orders, SCHEDULES[name].stage_places(places, chunks), micro_batches) == ()
    else:
        assert SCHEDULES[name].orders(places, chunks, micro_batches) == parse_csv(as_text(expected))


@pytest.mark.parametrize("micro_batches", range(1, 14))
@pytest.mark.parametrize("places", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("1F1B", 1),
        ("GPipe", 1),
        ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 3),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ],
)
def test_an_export_knows_which_numbers_of_micro_batches_they_take(
    name: str, chunks: int, places: int, micro_batches: int
) -> None:
    even = EvenPlan(
        pp=places, vpp=chunks, layers_per_stage=(1,) * (places * chunks), schedule=name,
        micro_batch_size=1, global_batch_size=micro_batches,
    )  # fmt: skip
    made = theirs.get_schedule_class(name)
    own: Any = stages(places, chunks)
    try:
        made(own[0] if issubclass(made, theirs.PipelineScheduleSingle) else own, micro_batches)
    except ValueError:
        assert not pytorch_takes(even)
        assert "schedule_csv" in torchtitan_toml(even, schedule_csv="own.csv")
    else:
        assert pytorch_takes(even)
        assert f'"{name}"' in torchtitan_toml(even)


def test_zb_h1_is_their_zero_bubble_with_one_stage_a_rank() -> None:
    expected = their_schedule("InterleavedZeroBubble", 4, 1, 12)
    assert SCHEDULES["ZBH1"].orders(4, 1, 12) == parse_csv(as_text(expected))


@pytest.mark.parametrize(("name", "chunks"), [("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_their_files_are_read_simple_and_lowered(name: str, chunks: int, tmp_path: Path) -> None:
    schedule = their_schedule(name, 4, chunks, 8)
    orders = SCHEDULES[name].orders(4, chunks, 8)
    schedule._dump_csv(str(tmp_path / "simple.csv"), format="compute_only")
    assert load_csv(tmp_path / "simple.csv") == orders

    schedule._dump_csv(str(tmp_path / "lowered.csv"), format="compute_comms")
    lowered = load_csv(tmp_path / "lowered.csv")
    kinds = {action.kind for row in lowered for action in row}
    assert {"SEND_F", "RECV_F", "SEND_B", "RECV_B"} <= kinds
    assert order_faults(computing(lowered), SCHEDULES[name].stage_places(4, chunks), 8) == ()


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "ShiftedCriticalPath"])  # they know no R
def test_they_read_ours_and_find_no_deadlock(name: str, tmp_path: Path) -> None:
    schedule = SCHEDULES[name]
    chunks = schedule.chunks or 2
    path = tmp_path / "ours.csv"
    path.write_text(format_csv(schedule.orders(3, chunks, 7)))
    engine = theirs._PipelineScheduleRuntime(stages(3, chunks), 7)
    engine._load_csv(str(path))
    lowered = {
        rank: [action for action in row if action.microbatch_index is not None]  # no (un)sharding, which it cannot play
        for rank, row in engine.pipeline_order_with_comms.items()
    }
    places = schedule.stage_places(3, chunks)
    simulated = theirs._simulate_comms_compute(lowered, places.__getitem__, 3 * chunks)
    played = {str(action) for row in simulated.values() for action in row if action is not None}
    assert {str(action) for row in schedule.orders(3, chunks, 7) for action in row if action.kind in "FI"} <= played
