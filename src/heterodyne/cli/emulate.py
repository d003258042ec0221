"""``heterodyne emulate``: a cluster of unequal workers on one machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from heterodyne.emulate import Mechanism, emulate
from heterodyne.errors import UnitError
from heterodyne.processes import require_no_launcher
from heterodyne.units import parse_bandwidth, parse_bytes

__all__ = ["command"]

_FAST = "10Gb/s"  # of a host whose link is not said
_MOST_BYTES_PER_S = 1.25e12


def command(
    run: Annotated[list[str], typer.Argument(metavar="CMD", help="What each worker runs; write -- before it.")],
    speeds: Annotated[
        str | None,
        typer.Option("--speeds", metavar="A,B,...", help="One number a worker: its share of a core, at most 1."),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="NxA[@LINK],...",
            help="Hosts with N workers each, in place of --speeds: 3x0.7,2x0.5@200Mb/s.",
        ),
    ] = None,
    own_disks: Annotated[
        Path | None,
        typer.Option(
            "--own-disks",
            metavar="FOLDER",
            help="Of this folder each of the hosts has a copy, and no other sees what it writes there; that stays in FOLDER.hosts/host-N.",
        ),
    ] = None,
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

    It is run once for each speed, or for each worker of the hosts, slowed down from outside, with the environment that torchrun gives;
    so any program that runs under torchrun can be run. Rank 0 has the terminal.
    """
    if mechanism not in ("auto", "cgroup", "signals"):
        raise UnitError(f"--mechanism {mechanism}: write auto, cgroup or signals")
    require_no_launcher(run, "emulate, one for each of its workers")
    chosen: Mechanism = mechanism  # type: ignore[assignment]  # the test above narrows it
    if (speeds is None) == (hosts is None) or (hosts is not None and links is not None):
        raise UnitError("give --speeds (and --links), or --hosts, whose links stand behind '@'")
    described = [] if hosts is None else [_host(text) for text in hosts.split(",")]
    return emulate(
        [_number(text) for text in (speeds or "").split(",") if text]
        or [s for of_host, _ in described for s in of_host],
        run,
        memory=None if memory is None else [parse_bytes(text) for text in memory.split(",")],
        links=[link for _, link in described]
        or (None if links is None else [parse_bandwidth(t) for t in links.split(",")]),
        own_disks=own_disks,
        hosts=[number for number, (of_host, _) in enumerate(described) for _ in of_host] or None,
        mechanism=chosen,
    )


def _host(text: str) -> tuple[list[float], float]:
    """Return the speeds of the workers of a host, and its link in bytes per second. Raises UnitError."""
    match = re.fullmatch(r"([0-9]{1,4})x\(?([0-9.]+)\)?(?:@(.+))?", text.strip())
    if match is None:
        raise UnitError(
            f"--hosts: {text!r} is no host; write for example 3x0.7@200Mb/s: three workers with 0.7 of a core, and a link"
        )
    count, speed, link = int(match[1]), _number(match[2], "--hosts"), parse_bandwidth(match[3] or _FAST)
    if not count or not speed or not 1 <= link <= _MOST_BYTES_PER_S:
        raise UnitError(f"--hosts: {text!r} needs a worker at least, a speed above 0, and a link from 1 B/s to 10 Tb/s")
    return [speed] * count, link


def _number(text: str, option: str = "--speeds") -> float:
    try:
        return float(text)
    except ValueError:
        raise UnitError(f"{option}: {text!r} is not a number; write for example 0.7,0.35,0.35,0.2") from None
