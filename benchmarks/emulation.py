"""Benchmarks on emulated workers: the script runs once more as each worker, and ways take turns in the same processes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heterodyne.runtime.comm.communicator import Communicator

__all__ = ["EQUAL", "UNEQUAL", "Rounds", "emulated", "in_rounds", "ratios", "worker_arguments"]

UNEQUAL = (0.7, 0.35, 0.35, 0.2)
EQUAL = (0.4, 0.4, 0.4, 0.4)


def emulated(
    speeds: tuple[float, ...], ways: list[str], size: Any, script: Path, *, links: str | None = None, hosts: str = ""
) -> dict[str, Any]:
    """Run a script once for each speed under emulation, and read what rank 0 wrote.

    ``links``: of each worker; ``hosts``: in place of speeds; both as the command takes them.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        emulate = [sys.executable, "-m", "heterodyne", "emulate"]
        emulate += ["--hosts", hosts] if hosts else ["--speeds", ",".join(map(str, speeds))]
        emulate += [] if links is None else ["--links", links]
        command = [*emulate, "--", sys.executable, str(script), "--worker", "--out", str(out), "--ways", *ways]
        command += ["--size", json.dumps(asdict(size))]
        subprocess.run(command, check=True)
        return json.loads(out.read_text())


def worker_arguments() -> argparse.Namespace | None:
    """``out``, ``ways`` and ``size``, as `emulated` gives them to a worker; None for anybody else."""
    if "--worker" not in sys.argv:
        return None
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ways", nargs="*")
    parser.add_argument("--size", type=json.loads)
    return parser.parse_args()


@dataclass(frozen=True)
class Rounds:
    """Seconds of a step, one a round: of all ranks together, and of each rank for itself, both by way."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    own: dict[str, list[list[float]]] = field(default_factory=dict)


def in_rounds(
    run: Mapping[str, Callable[[], object]], communicator: Communicator, *, rounds: int, steps: int, settle: int = 0
) -> Rounds:
    """Each way takes some steps in each round, so that a machine that gets slower does so for all; the first round warms up.

    ``settle``: steps at the begin of each turn that do not count: they find the caches full of what another way has left, and in training
    each step follows another one.
    """
    found = Rounds({way: [] for way in run}, {way: [] for way in run})
    for number in range(rounds + 1):
        for way, step in run.items():
            for _ in range(settle):
                step()
            communicator.barrier()
            started = time.perf_counter()
            for _ in range(steps):
                step()
            own = (time.perf_counter() - started) / steps
            communicator.barrier()
            whole = (time.perf_counter() - started) / steps
            if communicator.rank == 0:
                print(f"round {number}/{rounds} {way}: {whole:.3f} s a step", flush=True)
            if number:
                found.seconds[way].append(whole)
                found.own[way].append(communicator.all_gather_object(own))
    return found


def ratios(jobs: Sequence[Mapping[str, Any]], way: str, base: str) -> list[float]:
    """Round by round, so that what slows the machine down cancels out."""
    return [a / b for job in jobs for a, b in zip(job[way], job[base], strict=True)]
