"""Seconds of transfers over the real links, and what they take of the computing at both ends.

Unlike blocks, links are measured together: every rank makes the same calls the same number of times, as one rank has decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from heterodyne.cluster.profile import LinkSample
from heterodyne.measure.beside import rate
from heterodyne.measure.clock import ProcessorClock
from heterodyne.measure.notes import words_of
from heterodyne.measure.peers import P2P, Peers
from heterodyne.measure.repeats import NO_TIME, link_sample, timed, together
from heterodyne.measure.sampling import sample
from heterodyne.measure.workbench import Workbench
from heterodyne.units import format_bytes

__all__ = ["measure_host_copies", "measure_sends"]

SENT_BYTES = (64 * 2**10, 4 * 2**20, 64 * 2**20, 256 * 2**20)
_TELLING = 2  # of the sizes of messages: a small one and a large one
_MOST_BUSY = 50


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
    part = rate(peers, bench)
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
            timing = together(peers, round_trip, bench, source=a, left_s=share_s, expected_s=expected_s)
            mail.settle()
            if timing is None:
                left_out.append(f"{devices[a]} and {devices[b]} from {format_bytes(message)} on")
                break
            seen = peers.broadcast_object(timing, a)
            before = link_sample("send", (devices[a], devices[b]), message, seen, 2)
            if part and number < _TELLING:
                runs = max(1, min(_MOST_BUSY, round(bench.sampling.sample_s / seen.seconds)))
                busy = peers.all_gather_object(timed(peers, round_trip, runs, ProcessorClock()) / part / 2)
                mail.settle()
                before = replace(before, busy_s=(busy[a], busy[b]))
            samples.append(before)
    if left_out:
        bench.say(f"transfers were not measured between {', '.join(left_out)}: {NO_TIME}")
    return tuple(samples)


def measure_host_copies(bench: Workbench, *, budget_s: float = 10.0, most_bytes: int = 64 * 2**20) -> float:
    """Return the seconds a byte of the slower direction; 0 on a CPU, which is its own host.

    Devices of one machine share the way to its memory, so all copy at the same time. Raises MeasureError, on every rank alike, if it
    fails on any.
    """
    failure: str | None = None
    work: Callable[[], tuple[object, ...]] | None = None
    cause: Exception | None = None
    seconds = 0.0
    bench.meet()
    bench.progress("copies to the host", 1, 1)
    try:
        if bench.device.type != "cpu":
            work = _there_and_back(bench, most_bytes)
            timing = sample(work, bench.stopwatch, bench.sampling, budget_s=budget_s)
            seconds = max(timing.laps) / most_bytes
    except Exception as error:  # noqa: BLE001  # whatever it is, the others wait for the outcome
        failure, work, cause = f"copies to the host cannot be measured: {words_of(error)}", None, error
    bench.meet(work, failure=failure, cause=cause)
    return seconds


def _there_and_back(bench: Workbench, size_bytes: int) -> Callable[[], tuple[object, ...]]:
    here = torch.zeros(size_bytes, dtype=torch.uint8, device=bench.device)
    there = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)
    clock = bench.stopwatch

    def work() -> tuple[object, ...]:
        start = clock.mark()
        there.copy_(here, non_blocking=True)
        middle = clock.mark()
        here.copy_(there, non_blocking=True)
        return start, middle, clock.mark()

    return work
