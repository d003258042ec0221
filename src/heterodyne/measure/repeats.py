"""The same thing on all ranks, the same number of times, as one rank has decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from heterodyne.cluster.profile import LinkSample
from heterodyne.errors import MeasureError
from heterodyne.measure.clock import HostClock, Stopwatch
from heterodyne.measure.peers import Peers
from heterodyne.measure.sampling import Sampling, Timing, summarise
from heterodyne.measure.workbench import Workbench

__all__ = ["NO_TIME", "Repeats", "link_sample", "timed", "together"]

NO_TIME = "the time for measuring is used up"
_WARM_UP = 3  # the first collectives of a group open its connections
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_Span: TypeAlias = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """How often every rank does the same thing: ``samples`` times ``runs``. No samples: there is no time left."""

    samples: int
    runs: int

    @classmethod
    def of(cls, run_s: float, sampling: Sampling, left_s: float) -> Repeats:
        """The samples of a sampling if a run takes ``run_s``, as far as ``left_s`` allows."""
        runs = max(1, min(1000, round(sampling.sample_s / run_s) if run_s > 0 else 1))
        affordable = int(min(sampling.samples, left_s / (runs * run_s))) if run_s > 0 else sampling.samples
        if affordable < 1:
            affordable, runs = (1, 1) if left_s > run_s else (0, 0)
        return cls(samples=affordable, runs=runs)


def together(
    peers: Peers,
    run: Callable[[], None],
    bench: Workbench,
    *,
    source: int,
    left_s: float,
    expected_s: float = 0.0,
    between: tuple[Callable[[], None], float] | None = None,
) -> Timing | None:
    """Time ``run`` on all ranks, as often as rank ``source`` decides; None if it decides that there is no time. ``between``: what each
    does before each run, and for how long; then a run lasts as `measure_all_reduce` says, the same on every rank."""
    if not peers.broadcast_object(expected_s * (_WARM_UP + 1) <= left_s, source):
        return None
    clock = bench.stopwatch
    warm_up_s = [timed(peers, run, 1, clock) for _ in range(_WARM_UP)]
    run_s = max(warm_up_s[1:])  # a device that runs in bursts may have done one of them within a burst
    whole_s = run_s + (between[1] if between else 0.0)
    repeats = peers.broadcast_object(Repeats.of(whole_s, bench.sampling, left_s - sum(warm_up_s)), source)
    if repeats.samples == 0:
        return None
    if between is not None:
        lasting = _from_the_last if _share_a_clock(peers, clock) else _of_the_quickest
        own = [_each(peers, run, repeats.runs, clock, between[0]) for _ in range(repeats.samples)]
        of_ranks = [list(zip(*of_sample, strict=True)) for of_sample in zip(*peers.all_gather_object(own), strict=True)]
        return summarise([(fmean(map(lasting, of_sample)),) for of_sample in of_ranks])
    return summarise([(timed(peers, run, repeats.runs, clock),) for _ in range(repeats.samples)])


def _each(
    peers: Peers, run: Callable[[], None], runs: int, clock: Stopwatch, compute: Callable[[], None]
) -> list[_Span]:
    """Return when each run began, behind some computing, and ended; counted from the first of them where the clock is the device's."""
    peers.barrier()
    marks = []
    for _ in range(runs):
        compute()
        start = clock.mark()
        run()
        marks.append((start, clock.mark()))
    first = 0.0 if isinstance(clock, HostClock) else marks[0][0]
    return [(clock.seconds(first, start), clock.seconds(first, end)) for start, end in marks]


def _share_a_clock(peers: Peers, clock: Stopwatch) -> bool:
    """Return whether moments of all ranks are of one clock, that of a machine since it was started."""
    try:
        started = _BOOT.read_text() if isinstance(clock, HostClock) else ""
    except OSError:
        started = ""
    return set(peers.all_gather_object(started)) == {started} and bool(started)


def _from_the_last(spans: Sequence[_Span]) -> float:
    return max(end for _, end in spans) - max(start for start, _ in spans)


def _of_the_quickest(spans: Sequence[_Span]) -> float:
    return min(end - start for start, end in spans)


def timed(peers: Peers, run: Callable[[], None], runs: int, clock: Stopwatch) -> float:
    peers.barrier()
    start = clock.mark()
    for _ in range(runs):
        run()
    return clock.seconds(start, clock.mark()) / runs


def link_sample(op: str, devices: tuple[str, ...], size: int, timing: Timing, trips: int) -> LinkSample:
    seconds = timing.seconds / trips
    if seconds <= 0:
        raise MeasureError(f"{op} of {size} bytes among {', '.join(devices)} took no time at all; the clock is wrong")
    return LinkSample(
        op="send" if op == "send" else "all_reduce", devices=devices, bytes=size, seconds=seconds, spread=timing.spread
    )
