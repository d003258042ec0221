"""Stopping and continuing: what is done to a process group, and that it is undone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from heterodyne.emulate.duty_cycle import duty_cycle


@pytest.fixture
def spinner() -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def statuses(process: psutil.Process, number: int) -> set[str]:
    seen = set()
    for _ in range(number):
        seen.add(str(process.status()))
        time.sleep(0.003)
    return seen


def test_a_paced_worker_is_stopped_at_times_and_let_go_at_the_end(spinner: psutil.Process) -> None:
    with duty_cycle() as cycle:
        cycle.pace(spinner.pid, 0.05)  # a busy machine leaves it more than that
        assert any(psutil.STATUS_STOPPED in statuses(spinner, 50) for _ in range(100))
    assert psutil.STATUS_STOPPED not in statuses(spinner, 20)


def test_full_speed_is_left_alone(spinner: psutil.Process) -> None:
    with duty_cycle() as cycle:
        cycle.pace(spinner.pid, 1.0)
        assert psutil.STATUS_STOPPED not in statuses(spinner, 50)


def test_a_worker_that_ends_disturbs_nobody(spinner: psutil.Process) -> None:
    with duty_cycle() as cycle:
        cycle.pace(spinner.pid, 0.3)
        time.sleep(0.05)
        spinner.kill()
        time.sleep(0.05)
