"""``heterodyne emulate``: a cluster of unequal workers on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heterodyne.emulate import Mechanism, emulate
from heterodyne.errors import HeterodyneError, UnitError
from heterodyne.units import parse_bandwidth, parse_bytes

__all__ = ["command"]

_LAUNCHERS = frozenset(
    {"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch"}
    | {"deepspeed", "mpirun", "mpiexec", "srun"}
)


def command(
    run: Annotated[list[str], typer.Argument(metavar="CMD", help="What each worker runs; write -- before it.")],
    speeds: Annotated[
        str, typer.Option("--speeds", metavar="A,B,...", help="One number a worker: its share of a core, at most 1.")
    ],
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="A[,B...]", help="A limit for each worker, or one for all: 2GiB.")
    ] = None,
    links: Annotated[
        str | None, typer.Option("--links", metavar="A[,B...]", help="The link of each worker, or one for all: 1Gb/s.")
    ] = None,
    mechanism: Annotated[
        str, typer.Option(help="auto, cgroup (a CPU quota) or signals (SIGSTOP and SIGCONT).")
    ] = "auto",
) -> int:
    """Run a command on unequal workers.

    It is run once for each speed, slowed down from outside, with the environment that torchrun gives; so any program that runs
    under torchrun can be run. Rank 0 has the terminal.
    """
    if mechanism not in ("auto", "cgroup", "signals"):
        raise UnitError(f"--mechanism {mechanism}: write auto, cgroup or signals")
    _require_no_launcher(run)
    chosen: Mechanism = mechanism  # type: ignore[assignment]  # the test above narrows it
    return emulate(
        [_number(text) for text in speeds.split(",")],
        run,
        memory=None if memory is None else [parse_bytes(text) for text in memory.split(",")],
        links=None if links is None else [parse_bandwidth(text) for text in links.split(",")],
        mechanism=chosen,
    )


def _require_no_launcher(run: list[str]) -> None:
    """Raise HeterodyneError for a command that starts workers itself: each of ours would start as many."""
    launcher = Path(run[0]).name
    if launcher.startswith("python") and run[1:2] == ["-m"] and len(run) > 2:
        launcher = run[2]
    if launcher in _LAUNCHERS:
        raise HeterodyneError(
            f"'{launcher}' starts workers itself, and so does emulate, one for each of --speeds: write the program alone behind --, for "
            "example: heterodyne emulate --speeds 0.7,0.35 -- python train.py"
        )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UnitError(f"--speeds: {text!r} is not a number; write for example 0.7,0.35,0.35,0.2") from None
