"""Seconds of collectives and transfers over the real links, and what a collective in flight costs the computation beside it.

Unlike blocks, links are measured together: every rank makes the same calls the same number of times, as one rank has decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TypeAlias

import torch

from heterodyne.cluster.profile import LinkSample
from heterodyne.errors import MeasureError
from heterodyne.measure.clock import Clock, HostClock, ProcessorClock
from heterodyne.measure.peers import P2P, Peers, ProcessGroup
from heterodyne.measure.sampling import Sampling, Timing, summarise
from heterodyne.measure.workbench import Workbench
from heterodyne.units import format_bytes

__all__ = [
    "BETWEEN_S",
    "MESSAGE_BYTES",
    "Repeats",
    "matrix_product",
    "measure_all_reduce",
    "measure_overlap",
    "measure_sends",
    "moment",
]

MESSAGE_BYTES = (2**10, 64 * 2**10, 512 * 2**10, 4 * 2**20, 16 * 2**20)
SENT_BYTES = (64 * 2**10, 4 * 2**20, 64 * 2**20, 256 * 2**20)
_WARM_UP = 3  # the first collectives of a group open its connections
_COVER = 3  # computation lasts so many times the collective that it hides
_MATRIX = 192
_GUESS = 10
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_Span: TypeAlias = tuple[float, float]
BETWEEN_S = 0.01  # of computing between two collectives, as in steps
_TELLING = 2  # of the sizes of messages: a small one and a large one
_MOST_BUSY = 50
_NO_TIME = "the time for measuring is used up"


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """How often every rank does the same thing: ``samples`` times ``runs``. No samples: there is no time left."""

    samples: int
    runs: int

    @classmethod
    def of(cls, run_s: float, sampling: Sampling, left_s: float) -> Repeats:
        """The samples of a sampling if a run takes ``run_s``, as far as ``left_s`` allows."""
        runs = max(1, min(1000, round(sampling.sample_s / run_s) if run_s > 0 else 1))
        affordable = int(left_s / (runs * run_s)) if run_s > 0 else sampling.samples
        if affordable < 1:
            affordable, runs = (1, 1) if left_s > run_s else (0, 0)
        return cls(samples=min(sampling.samples, affordable), runs=runs)


def measure_all_reduce(
    peers: Peers,
    process_group: ProcessGroup,
    devices: Sequence[str],
    bench: Workbench,
    *,
    message_bytes: Sequence[int] = MESSAGE_BYTES,
    budget_s: float = 10.0,
) -> tuple[LinkSample, ...]:
    """All-reduce among all ranks at several sizes; the same result on every rank. Nothing for one rank.

    Each device computes for a moment before each, as in a step: a device that is held to a part of a processor comes to it with nothing
    left of that part, and copies more slowly than in one collective behind another. It lasts from the moment at which the last rank comes
    until the last one has it; where the ranks have no clock in common, as long as for the rank that spends least time in it.

    Sizes that do not fit the budget are left out, the largest first, and that is said on every rank.
    """
    if peers.world_size < 2:
        return ()
    samples: list[LinkSample] = []
    deadline = bench.now() + budget_s
    compute = moment(peers, bench)
    for index, size in enumerate(sorted(message_bytes)):
        bench.progress(f"all-reduce of {format_bytes(size)}", index + 1, len(message_bytes))
        (tensor,) = process_group.buffers([(size // 4, torch.float32)])

        def reduce(tensor: torch.Tensor = tensor) -> None:
            process_group.all_reduce(tensor).wait()

        expected_s = samples[-1].seconds * size / samples[-1].bytes if samples else 0.0
        left_s = deadline - bench.now()
        timing = _together(
            peers, reduce, bench, source=0, left_s=left_s, expected_s=expected_s, between=(compute, BETWEEN_S)
        )
        if timing is None:
            text = f"all-reduce was not measured from {format_bytes(size)} on"
            bench.say(f"{text}: {_NO_TIME}")
            break
        samples.append(_sample("all_reduce", tuple(devices), size, timing, 1))
    return tuple(samples)


def measure_sends(
    peers: Peers,
    devices: Sequence[str],
    bench: Workbench,
    *,
    message_bytes: Sequence[int] = SENT_BYTES,
    budget_s: float = 10.0,
) -> tuple[LinkSample, ...]:
    """Transfers from each rank to the next, around the ring, as half of a round trip; the same result on every rank.

    They go the way of training: from device to device by their backend, or through host memory. The first two sizes tell latency and
    bandwidth; of larger ones those are sent that a link is expected to carry within one sample. Of the first two it is also measured what
    they take of the computing at both ends, where the host computes: bytes are copied, packets wake threads, Python hands them over.
    """
    if peers.world_size < 2:
        return ()
    mail = peers.p2p()
    try:
        return _sends(peers, mail, devices, bench, sorted(message_bytes), budget_s)
    finally:
        mail.close()


def _sends(
    peers: Peers, mail: P2P, devices: Sequence[str], bench: Workbench, message_bytes: Sequence[int], budget_s: float
) -> tuple[LinkSample, ...]:
    size = peers.world_size
    pairs = [(rank, (rank + 1) % size) for rank in range(size)][: 1 if size == 2 else size]
    samples: list[LinkSample] = []
    left_out: list[str] = []
    deadline = bench.now() + budget_s
    rate = _rate(peers, bench)
    for index, (a, b) in enumerate(pairs):
        bench.progress(f"transfers between {devices[a]} and {devices[b]}", index + 1, len(pairs))
        before: LinkSample | None = None
        if peers.rank in (a, b):
            mail.connect([a + b - peers.rank])
        for number, message in enumerate(message_bytes):
            if number > 1 and before and before.seconds * message / before.bytes > bench.sampling.sample_s:
                break
            tensor = torch.zeros(message // 4 if peers.rank in (a, b) else 0, device=bench.device)

            def round_trip(tensor: torch.Tensor = tensor, a: int = a, b: int = b) -> None:
                if peers.rank == a:
                    mail.send(tensor, b)
                    mail.receive(tuple(tensor.shape), tensor.dtype, b).wait()
                elif peers.rank == b:
                    mail.send(mail.receive(tuple(tensor.shape), tensor.dtype, a).wait(), a)

            share_s = (deadline - bench.now()) / (len(pairs) - index)
            expected_s = 2 * before.seconds * message / before.bytes if before else 0.0
            timing = _together(peers, round_trip, bench, source=a, left_s=share_s, expected_s=expected_s)
            mail.settle()
            if timing is None:
                left_out.append(f"{devices[a]} and {devices[b]} from {format_bytes(message)} on")
                break
            seen = peers.broadcast_object(timing, a)
            before = _sample("send", (devices[a], devices[b]), message, seen, 2)
            if rate and number < _TELLING:
                runs = max(1, min(_MOST_BUSY, round(bench.sampling.sample_s / seen.seconds)))
                busy = peers.all_gather_object(_timed(peers, round_trip, runs, ProcessorClock()) / rate / 2)
                mail.settle()
                before = replace(before, busy_s=(busy[a], busy[b]))
            samples.append(before)
    if left_out:
        bench.say(f"transfers were not measured between {', '.join(left_out)}: {_NO_TIME}")
    return tuple(samples)


def measure_overlap(
    peers: Peers,
    process_group: ProcessGroup,
    bench: Workbench,
    *,
    message_bytes: int = 4 * 2**20,
    rounds: int = 5,
    compute: Callable[[], object] | None = None,
    lasting_s: float = 0.0,
) -> float:
    """Seconds of computation that this rank loses per second of a collective in flight, in [0, 1].

    ``compute`` (default: a product of small matrices) is repeated until it lasts three times the collective, with and without
    the collective beside it, in turn; the difference is what the collective took away. 0 for one rank. ``lasting_s``: of one in a step, if
    that is known to be longer than one behind another.

    Where the host computes, what a collective takes is the processor's time that this process spends on it, at the rate at which
    it gets any: a worker that is held to a part of a core pays from that part for every byte that its threads copy.
    """
    if peers.world_size < 2:
        return 0.0
    clock = bench.stopwatch
    (tensor,) = process_group.buffers([(message_bytes // 4, torch.float32)])
    work = matrix_product(bench.device) if compute is None else compute

    def reduce() -> None:
        process_group.all_reduce(tensor).wait()

    def compute_s(times: int, runs: int, *, beside: bool) -> float:
        """Seconds of ``times`` computations, the mean of ``runs``; the time to wait for the collective is not in it."""
        peers.barrier()
        total = 0.0
        for _ in range(runs):
            start = clock.mark()
            pending = process_group.all_reduce(tensor) if beside else None
            for _ in range(times):
                work()
            end = clock.mark()
            if pending is not None:
                pending.wait()
            total += clock.seconds(start, end)
        return total / runs

    _timed(peers, reduce, 1, clock)
    # The number of collectives has to be the same everywhere, so one rank's word counts for all.
    alone_s = peers.broadcast_object(median(_timed(peers, reduce, 1, clock) for _ in range(rounds)), 0)
    runs = max(1, min(1000, round(bench.sampling.sample_s / (_COVER * alone_s)))) if alone_s > 0 else 1
    # As for any sample: a device that runs in bursts shows its speed over many of them.
    some = max(1, round(bench.sampling.sample_s / max(compute_s(_GUESS, 1, beside=False) / _GUESS, 1e-6)))
    unit_s = compute_s(some, 1, beside=False) / some
    times = max(1, min(100_000, round(_COVER * alone_s / unit_s))) if unit_s > 0 else 1
    if isinstance(clock, HostClock):
        lasting_s = max(alone_s, lasting_s)
        return _share_of_processor(lasting_s, peers, reduce, lambda: [work() for _ in range(times * runs)], rounds)
    lost = [compute_s(times, runs, beside=True) - compute_s(times, runs, beside=False) for _ in range(rounds)]
    return min(1.0, max(0.0, median(lost) / max(alone_s, lasting_s))) if alone_s > 0 else 0.0


def _share_of_processor(
    alone_s: float, peers: Peers, reduce: Callable[[], None], compute: Callable[[], object], rounds: int
) -> float:
    """Seconds that the processor's work of a collective of ``alone_s`` takes from computing, a second; at most 1."""
    spent = _timed(peers, reduce, 2 * rounds, ProcessorClock())
    rate = _rate_of(compute)
    return min(1.0, spent / (rate * alone_s)) if alone_s > 0 and rate > 0 else 0.0


def _rate(peers: Peers, bench: Workbench) -> float:
    """Seconds of a processor that this rank gets in a second while all compute; 0 where some device is none of a host."""
    hosts = all(peers.all_gather_object(isinstance(bench.stopwatch, HostClock)))
    if not hosts:
        return 0.0
    work, until = matrix_product(bench.device), bench.sampling.section_s

    def compute() -> None:
        began = time.perf_counter()
        while time.perf_counter() - began < until:
            work()

    peers.barrier()
    return _rate_of(compute)


def _rate_of(compute: Callable[[], object]) -> float:
    """Of the processor's seconds to those of the clock."""
    processor, wall = ProcessorClock(), HostClock()
    start, began = processor.mark(), wall.mark()
    compute()
    return processor.seconds(start, processor.mark()) / max(wall.seconds(began, wall.mark()), 1e-9)


def _together(
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
    warm_up_s = [_timed(peers, run, 1, clock) for _ in range(_WARM_UP)]
    run_s = max(warm_up_s[1:])  # a device that runs in bursts may have done one of them within a burst
    whole_s = run_s + (between[1] if between else 0.0)
    repeats = peers.broadcast_object(Repeats.of(whole_s, bench.sampling, left_s - sum(warm_up_s)), source)
    if repeats.samples == 0:
        return None
    if between is not None:
        lasting = _from_the_last if _share_a_clock(peers, clock) else _of_the_quickest
        own = [_each(peers, run, repeats.runs, clock, between[0]) for _ in range(repeats.samples)]
        together = [list(zip(*of_sample, strict=True)) for of_sample in zip(*peers.all_gather_object(own), strict=True)]
        return summarise([(fmean(map(lasting, of_sample)),) for of_sample in together])
    return summarise([(_timed(peers, run, repeats.runs, clock),) for _ in range(repeats.samples)])


def _each(peers: Peers, run: Callable[[], None], runs: int, clock: Clock, compute: Callable[[], None]) -> list[_Span]:
    """When each run began, behind some computing, and ended; counted from the first of them where the clock is the device's."""
    peers.barrier()
    marks = []
    for _ in range(runs):
        compute()
        start = clock.mark()
        run()
        marks.append((start, clock.mark()))
    first = 0.0 if isinstance(clock, HostClock) else marks[0][0]
    return [(clock.seconds(first, start), clock.seconds(first, end)) for start, end in marks]


def _share_a_clock(peers: Peers, clock: Clock) -> bool:
    """Whether moments of all ranks are of one clock, that of a machine since it was started."""
    try:
        started = _BOOT.read_text() if isinstance(clock, HostClock) else ""
    except OSError:
        started = ""
    return set(peers.all_gather_object(started)) == {started} and bool(started)


def _from_the_last(spans: Sequence[_Span]) -> float:
    return max(end for _, end in spans) - max(start for start, _ in spans)


def _of_the_quickest(spans: Sequence[_Span]) -> float:
    return min(end - start for start, end in spans)


def _timed(peers: Peers, run: Callable[[], None], runs: int, clock: Clock) -> float:
    peers.barrier()
    start = clock.mark()
    for _ in range(runs):
        run()
    return clock.seconds(start, clock.mark()) / runs


def _sample(op: str, devices: tuple[str, ...], size: int, timing: Timing, trips: int) -> LinkSample:
    seconds = timing.seconds / trips
    if seconds <= 0:
        raise MeasureError(f"{op} of {size} bytes among {', '.join(devices)} took no time at all; the clock is wrong")
    return LinkSample(
        op="send" if op == "send" else "all_reduce", devices=devices, bytes=size, seconds=seconds, spread=timing.spread
    )


def moment(peers: Peers, bench: Workbench) -> Callable[[], None]:
    """Computes for about `BETWEEN_S`, by this device's own speed while all compute. Collective."""
    clock, work = bench.stopwatch, matrix_product(bench.device)

    def computing_s(times: int) -> float:
        start = clock.mark()
        for _ in range(times):
            work()
        return clock.seconds(start, clock.mark())

    peers.barrier()
    some = max(1, round(bench.sampling.sample_s / max(computing_s(_GUESS) / _GUESS, 1e-6)))
    times = max(1, round(BETWEEN_S * some / max(computing_s(some), 1e-6)))

    def compute() -> None:
        for _ in range(times):
            work()

    return compute


def matrix_product(device: torch.device) -> Callable[[], object]:
    """Something to compute that is over soon."""
    a, b = torch.ones(_MATRIX, _MATRIX, device=device), torch.ones(_MATRIX, _MATRIX, device=device)
    return lambda: torch.mm(a, b)
