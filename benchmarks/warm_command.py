"""``heterodyne ARGUMENTS`` in a process that is forked from one that has imported torch, or in a new interpreter; with a limit of time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from multiprocess.pool import PRELOADED

__all__ = ["Ended", "run"]

INTERRUPTED_S = 10.0  # what a command may take to end after Ctrl-C
MOST_BYTES = 8 * 2**30  # of its own memory, so that an absurd size harms nobody else on the machine
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended.

    Args:
        status: exit status, or minus the signal.
        seconds: until it ended, or until it was interrupted.
        said: both streams.
        interrupted: it was still at work when the limit was over, and had Ctrl-C.
        killed: it did not end after that either.
    """

    status: int
    seconds: float
    said: str
    interrupted: bool = False
    killed: bool = False


def run(
    arguments: Sequence[str], *, place: Path, variables: Mapping[str, str], limit_s: float, warm: bool = True
) -> Ended:
    """Run it in a directory; whatever is left of it is killed."""
    output = place / ".said"
    started = time.perf_counter()
    process, wait = (_forked if warm else _new)(list(arguments), place, dict(variables), output)
    status = wait(limit_s)
    seconds = time.perf_counter() - started
    interrupted = killed = False
    if status is None:
        interrupted = True
        os.kill(process, signal.SIGINT)
        status = wait(INTERRUPTED_S)
    if status is None:
        killed = True
        _kill(process)
        status = wait(INTERRUPTED_S)
    said = output.read_bytes().decode("utf-8", "replace")
    return Ended(
        status=-9 if status is None else status, seconds=seconds, said=said, interrupted=interrupted, killed=killed
    )


Wait = Callable[[float], int | None]


def _forked(arguments: list[str], place: Path, variables: dict[str, str], output: Path) -> tuple[int, Wait]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    process: Any = context.Process(target=_live, args=(arguments, str(place), variables, str(output)))
    output.write_bytes(b"")
    process.start()

    def wait(seconds: float) -> int | None:
        process.join(seconds)
        return None if process.exitcode is None else int(process.exitcode)

    return process.pid, wait


def _new(arguments: list[str], place: Path, variables: dict[str, str], output: Path) -> tuple[int, Wait]:
    environment = {key: value for key, value in os.environ.items() if key not in OURS} | variables
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "heterodyne", *arguments], cwd=place, env=environment, stdin=subprocess.DEVNULL,
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def wait(seconds: float) -> int | None:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    return process.pid, wait


def _live(arguments: list[str], place: str, variables: dict[str, str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    os.chdir(place)
    for name in OURS:
        os.environ.pop(name, None)
    os.environ.update(variables)
    sys.argv = ["heterodyne", *arguments]
    gc.freeze()
    import torch

    from heterodyne.cli import main

    torch.set_num_threads(1)
    sys.exit(main(arguments))


def _kill(process: int) -> None:
    """It, and what it has started."""
    try:
        every = [psutil.Process(process), *psutil.Process(process).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in every:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
