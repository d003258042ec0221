"""Metrics: every step once, whatever happened in between."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from heterodyne.errors import HeterodyneError
from heterodyne.runtime.records.metrics import MetricsFile, StepRecord, Validation
from heterodyne.runtime.records.peak_memory import peak_memory_bytes
from heterodyne.runtime.records.progress import BarReporter, LineReporter, reporter_for


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        loss=5.0 / step,
        grad_norm=1.0,
        lr=1e-3,
        step_s=0.5,
        samples_per_s=64.0,
        tokens_per_s=8192.0,
        efficiency=0.93,
        memory_bytes=10**9,
        time_s=1e9 + step,
    )


def write(path: Path, steps: range, done: int = 0) -> None:
    file = MetricsFile(path, done=done)
    for step in steps:
        file.write(record(step))
        if step % 3 == 0:
            file.write(Validation(step=step, validation_loss=1.0, time_s=0.0))
    file.close()


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@given(reached=st.integers(0, 12), done=st.integers(0, 12), cut=st.integers(0, 200))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_resuming_no_step_is_there_twice_and_none_is_missing(
    tmp_path: Path, reached: int, done: int, cut: int
) -> None:
    """Killed after ``reached`` steps, in the middle of a line perhaps, and resumed from a checkpoint of ``done``."""
    done = min(done, reached)
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    write(path, range(1, reached + 1))
    with path.open("a") as file:
        file.write((json.dumps({"step": reached + 1, "loss": 1.0}) + "\n")[:cut])
    write(path, range(done + 1, 13), done=done)
    found = lines(path)
    assert [line["step"] for line in found if "loss" in line] == list(range(1, 13))
    assert [line["step"] for line in found if "validation_loss" in line] == [3, 6, 9, 12]


@pytest.mark.tour("runtime/records/")
def test_a_line_says_everything_and_is_there_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(replace(record(1), loss=math.inf, tokens_per_s=None))
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line == {
        "step": 1, "loss": None, "grad_norm": 1.0, "lr": 1e-3, "step_s": 0.5, "samples_per_s": 64.0, "tokens_per_s": None,
        "efficiency": 0.93, "memory_bytes": 10**9, "time_s": 1e9 + 1,
    }  # fmt: skip
    file.close()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeterodyneError, match=r"metrics\.jsonl cannot be written"):
        MetricsFile(tmp_path / "nowhere" / "metrics.jsonl")


def test_memory_is_at_least_what_was_used_at_once() -> None:
    ballast = torch.ones(30_000_000)
    assert peak_memory_bytes(torch.device("cpu")) > ballast.numel() * 4


def test_lines_come_first_last_and_every_few_seconds() -> None:
    seconds = iter([0.0, *[float(second) for second in range(1, 13)]])
    out = io.StringIO()
    reporter = reporter_for(out, total=12)
    assert isinstance(reporter, LineReporter), "what is no terminal gets lines"
    reporter = LineReporter(12, out, every_s=5.0, clock=lambda: next(seconds))
    for step in range(1, 13):
        reporter.step(record(step))
    reporter.validation(Validation(step=12, validation_loss=1.5, time_s=0.0))
    reporter.close()
    told = out.getvalue().splitlines()
    assert [line.split(" ")[1] for line in told[:-1]] == ["1/12", "6/12", "11/12", "12/12"]
    assert told[0] == "step 1/12 · loss 5.0000 · 64 samples/s · efficiency 93% · 5.5 s left"
    assert told[-1] == "step 12: validation loss 1.5000"


def test_a_terminal_gets_a_bar_and_sentences_above_it() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    reporter = BarReporter(12, console)
    reporter.step(record(4))
    reporter.say("a [sentence] as it is")
    reporter.close()
    assert "a [sentence] as it is" in out.getvalue()
    assert "4/12" in out.getvalue()
    assert "loss 1.2500 · 64 samples/s · efficiency 93% · 4 s left" in out.getvalue()
