"""What is learned from a lack of memory, and how often a run is started again for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.api import again
from heterodyne.api.again import KernelKills, Training, train_here
from heterodyne.api.learned_memory import as_learned
from heterodyne.cluster import Cluster, Device
from heterodyne.cluster.written import cluster_to_json
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.errors import HeterodyneError, OutOfMemoryError
from heterodyne.plan import Plan
from heterodyne.plan.plan import Prediction
from heterodyne.processes import OUT_OF_MEMORY
from heterodyne.run_directory import RunDirectory
from heterodyne.runtime.records.shortages import Shortage, note_shortage, read_shortages

SHORTAGE = Shortage(
    device="n/gpu:0",
    rank=0,
    step=7,
    where="0F0",
    used_bytes=100,
    asked_bytes=20,
    free_bytes=5,
    predicted_bytes=0,
    longer=False,
)
SIZES = st.integers(0, 2**40)


@given(used=SIZES, asked=st.integers(1, 2**40), free=SIZES, predicted=st.integers(1, 2**40), longer=st.booleans())
def test_the_plan_that_failed_does_not_fit_what_was_seen(
    used: int, asked: int, free: int, predicted: int, longer: bool
) -> None:
    for backend in ("cpu", "cuda"):
        context = 0 if backend == "cpu" else MemoryAssumptions().context(backend)
        devices = [Device(id=f"n/{i}", kind="k", node="n", memory_bytes=2**50, backend=backend) for i in range(2)]
        seen = replace(
            SHORTAGE,
            device="n/1",
            used_bytes=used,
            asked_bytes=asked,
            free_bytes=min(free, asked - 1),
            predicted_bytes=context + predicted,
            longer=longer,
        )
        cluster = Cluster(name="c", devices=tuple(devices))
        learned = as_learned(cluster, [seen])
        assert learned.devices[0] == devices[0]
        own = learned.devices[1].memory_bytes - context
        assert own <= seen.usable_bytes < seen.needed_bytes
        assert longer or own < predicted
        assert as_learned(cluster, [seen, replace(seen, used_bytes=2 * used)]).devices[1].memory_bytes <= context + own


def test_shortages_are_kept_by_all_ranks_and_damage_is_told(tmp_path: Path) -> None:
    file = tmp_path / "lacked.jsonl"
    assert read_shortages(file) == ()
    both = (SHORTAGE, replace(SHORTAGE, rank=1, step=None))
    for each in both:
        note_shortage(file, each)
    assert read_shortages(file) == both
    file.write_text(file.read_text() + '{"device": 1}\n')
    with pytest.raises(HeterodyneError, match="remove it to forget"):
        read_shortages(file)


def started(folder: Path, **more: Any) -> Training:
    how: dict[str, Any] = {"resume": False, "overrides": ("training.steps=9",), "on_out_of_memory": "replan"} | more
    return Training(job=Path("job.yaml"), cluster=None, plan=Path("plan.json"), run_dir=folder, **how)


def workers(monkeypatch: pytest.MonkeyPatch, folder: Path, steps: Sequence[int]) -> list[Sequence[str]]:
    """Workers that lack memory in these steps, one try after the other, and then end well; what they were started with."""
    calls: list[Sequence[str]] = []

    def run(count: int, arguments: Sequence[str], _: Callable[[int], str | None]) -> int:
        calls.append(arguments)
        if len(calls) > len(steps):
            return 0
        for rank in range(count):
            lacked = replace(SHORTAGE, rank=rank, step=steps[len(calls) - 1], attempt=str(len(calls)))
            note_shortage(folder / "out-of-memory.jsonl", lacked)
        return OUT_OF_MEMORY

    monkeypatch.setattr(again, "workers_here", lambda _: 2)
    monkeypatch.setattr(again, "run_workers", run)
    return calls


@pytest.mark.parametrize(
    ("steps", "tries", "status"),
    [((), 1, 0), ((3, 3, 5), 4, 0), ((3,) * 9, 5, OUT_OF_MEMORY), ((3, 4, 4, 4, 4, 2, 4), 6, OUT_OF_MEMORY)],
)
def test_workers_start_again_as_long_as_they_come_further(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    steps: Sequence[int],
    tries: int,
    status: int,
) -> None:
    calls = workers(monkeypatch, tmp_path, steps)
    assert train_here(started(tmp_path), lambda _: 1) == status
    assert len(calls) == tries
    assert "--plan" in calls[0]
    assert "--resume" not in calls[0]
    for call in calls[1:]:
        assert "--plan" not in call
        assert "--resume" in call
    told = capfd.readouterr().err
    assert told.count("planning again with less memory: rank 0 (n/gpu:0)") == tries - 1
    assert told.count("5 plans in a row have run out of memory") == (status != 0)


def test_asked_to_stop_they_do_not_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = workers(monkeypatch, tmp_path, (3,))
    assert train_here(started(tmp_path, on_out_of_memory="stop"), lambda _: 1) == OUT_OF_MEMORY
    assert len(calls) == 1


def test_the_only_process_becomes_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Sequence[str]] = []
    monkeypatch.setattr(again, "workers_here", lambda _: None)
    monkeypatch.setattr(os, "execv", lambda _, command: became.append(command) or 0)

    def train(training: Training) -> int:
        assert training.run_dir is not None
        note_shortage(training.run_dir / "out-of-memory.jsonl", SHORTAGE)
        raise OutOfMemoryError("no more", rank=0)

    assert train_here(started(tmp_path), train) == 0
    assert list(became[0][4:]) == [
        "train",
        "job.yaml",
        "--resume",
        "--set",
        "training.steps=9",
        "--run-dir",
        str(tmp_path),
    ]
    assert train_here(started(tmp_path, on_out_of_memory="stop"), train) == OUT_OF_MEMORY


def test_what_the_kernel_killed_is_planned_with_less_than_was_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tuple(Device(id=f"n/cpu:{i}", kind="cpu", node="n", memory_bytes=2**30) for i in range(2))
    cluster, run, counts = Cluster(name="c", devices=devices), RunDirectory(tmp_path), tmp_path / "vmstat"
    counts.write_text("pgmajfault 1\noom_kill 3\n")
    kills = KernelKills(run, counts)
    assert kills.explain(1) is None
    counts.write_text("pgmajfault 1\noom_kill 4\n")
    assert kills.explain(1) is not None
    assert not kills.noted, "there is no plan yet"
    run.cluster.write_text(cluster_to_json(cluster))
    predicted = Prediction(step_s=1.0, samples_per_s=1.0, memory_bytes={"n/cpu:1": 1000})
    Plan(global_batch_size=4, pipelines=(), predicted=predicted).save(run.plan)
    assert kills.explain(1) is not None
    assert kills.noted
    assert [d.memory_bytes for d in as_learned(cluster, read_shortages(run.shortages)).devices] == [2**30, 999]

    statuses = [137, 0, 137]
    monkeypatch.setattr(again, "workers_here", lambda _: 2)
    monkeypatch.setattr(again, "KernelKills", lambda _: kills)
    monkeypatch.setattr(again, "run_workers", lambda *_: statuses.pop(0))
    assert train_here(started(tmp_path), lambda _: 1) == 0
    kills.noted = False
    assert train_here(started(tmp_path), lambda _: 1) == 137, "somebody else has killed it"


def test_workers_that_a_launcher_restarts_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    seen: list[bool] = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        assert train_here(started(tmp_path), lambda training: seen.append(training.restarted) or 0) == 0
    assert seen == [False, True]
