"""Requests that cannot be met are refused with all that is wrong, before anything is made."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from heterodyne.emulate import emulate
from heterodyne.emulate.names import is_leftover, name_of
from heterodyne.emulate.network import why_not
from heterodyne.errors import EmulateError


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ([], "no speeds: give one for each worker"),
        ([0.5, 0.0], "the speed of rank 1 is 0; it must be at least 0.001 and at most 1"),
        ([-0.5], "the speed of rank 0 is -0.5"),
        ([1.5], "the speed of rank 0 is 1.5"),
        ([float("nan")], "the speed of rank 0 is nan"),
    ],
)
def test_speeds_out_of_range_are_refused(speeds: list[float], message: str) -> None:
    with pytest.raises(EmulateError, match=message):
        emulate(speeds, ["true"])


@pytest.mark.tour("emulate/")
def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(EmulateError) as raised:
        emulate([2.0, 0.5], [], memory=[1, 2**30], links=[0.0])
    message = str(raised.value)
    for fault in ("speed of rank 0", "memory of rank 0", "link of rank 0", "link of rank 1", "no command"):
        assert fault in message
    assert "memory of rank 1" not in message


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(EmulateError, match="'no-such-program' is no program that can be run"):
        emulate([0.5], ["no-such-program"])


def test_one_value_is_for_all_and_other_numbers_of_values_are_refused() -> None:
    with pytest.raises(EmulateError, match="memory: 2 values for 3 workers; give one for each, or one for all"):
        emulate([0.5, 0.5, 0.5], ["true"], memory=[2**30, 2**30])


def test_links_need_root() -> None:
    assert why_not(user=1000) == "network namespaces need root"


def test_what_a_living_process_made_is_no_leftover() -> None:
    assert not is_leftover(name_of(0))


def test_what_a_dead_process_made_is_one() -> None:
    dead = max(psutil.pids()) + 1_000_000  # beyond what is in use, whatever the kernel's limit
    assert is_leftover(name_of(3).replace(f"-{os.getpid()}-", f"-{dead}-"))


@pytest.mark.parametrize(
    "name", ["heterodyne", "heterodyne-1-2", "heterodyne-1-2-0", "docker-1-2-0", "heterodyne-x-y-0"]
)
def test_other_names_are_left_alone(name: str) -> None:
    """The third has our form, but comes from another namespace of processes."""
    assert not is_leftover(name)


def test_nothing_is_made_for_a_refused_request(tmp_path: Path) -> None:
    with pytest.raises(EmulateError):
        emulate([2.0], ["true"], logs=tmp_path / "logs")
    assert not (tmp_path / "logs").exists()
