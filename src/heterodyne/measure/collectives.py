"""Seconds of all-reduces, and what one in flight costs the computation beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean, median, quantiles
from typing import Final

import torch

from heterodyne.cluster.profile import LinkSample
from heterodyne.cost.collective import fit
from heterodyne.measure.beside import BETWEEN_S, GUESS, matrix_product, moment, rate_of, stretch, varied
from heterodyne.measure.clock import HostClock, ProcessorClock
from heterodyne.measure.peers import Peers, ProcessGroup
from heterodyne.measure.repeats import NO_TIME, link_sample, timed, together
from heterodyne.measure.workbench import Workbench
from heterodyne.units import format_bytes

__all__ = ["MESSAGE_BYTES", "PART_BYTES", "measure_all_reduce", "measure_exchanges", "measure_overlap"]

MESSAGE_BYTES = (2**10, 64 * 2**10, 512 * 2**10, 4 * 2**20, 16 * 2**20)
_ALWAYS = 2  # so many sizes, whatever time is left
_COVER = 3  # computation lasts so many times the collective that it hides


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

    Each device writes its tensor and computes for a moment before each, as in a step: what a processor has written itself is in its own
    caches, and takes its neighbours longer to read than what a collective has left; and a device that is held to a part of a processor
    comes to it with nothing left of that part. It lasts from the moment at which the last rank comes
    until the last one has it; where the ranks have no clock in common, as long as for the rank that spends least time in it.

    Sizes that do not fit the budget are left out, the largest first, and that is said on every rank; but for the two smallest, which are
    measured even beyond the budget: without any time for a link no plan can be made, and one size alone does not tell latency
    from bandwidth.
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

        def before(tensor: torch.Tensor = tensor) -> None:
            tensor.zero_()
            compute()

        known = [(own.bytes, own.seconds) for own in samples if own.seconds > 0]
        expected_s = fit(known)(size) if len(known) > 1 else 0.0
        begun_s = bench.now()
        left_s = inf if index < _ALWAYS else deadline - begun_s
        often = _often(bench, (deadline - begun_s) / (2 * (len(message_bytes) - index)))  # larger ones need more of it
        timing = together(
            peers, reduce, often, source=0, left_s=left_s, expected_s=expected_s, between=(before, BETWEEN_S)
        )
        if timing is None:
            text = f"all-reduce was not measured from {format_bytes(size)} on"
            bench.say(f"{text}: {NO_TIME}")
            break
        samples.append(link_sample("all_reduce", tuple(devices), size, timing, 1))
    return tuple(samples)


def _often(bench: Workbench, share_s: float) -> Workbench:
    """With samples as long as this share of the time allows, up to a section's: what a collective takes hangs on the moment at which the
    last rank comes to it, of which a few runs tell little."""
    sampling = bench.sampling
    longer_s = min(sampling.section_s, share_s / sampling.samples)
    return replace(bench, sampling=replace(sampling, sample_s=max(sampling.sample_s, longer_s)))


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
    """Seconds of computation that this rank loses per second of a collective in flight; more than 1 where its processor needs longer for
    it than it lasted by itself.

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

    timed(peers, reduce, 1, clock)
    # The number of collectives has to be the same everywhere, so one rank's word counts for all.
    alone_s = peers.broadcast_object(median(timed(peers, reduce, 1, clock) for _ in range(rounds)), 0)
    runs = max(1, min(1000, round(bench.sampling.sample_s / (_COVER * alone_s)))) if alone_s > 0 else 1
    # As for any sample: a device that runs in bursts shows its speed over many of them.
    some = max(1, round(bench.sampling.sample_s / max(compute_s(GUESS, 1, beside=False) / GUESS, 1e-6)))
    unit_s = compute_s(some, 1, beside=False) / some
    times = max(1, min(100_000, round(_COVER * alone_s / unit_s))) if unit_s > 0 else 1
    if isinstance(clock, HostClock):
        lasting_s = max(alone_s, lasting_s)
        return _share_of_processor(
            lasting_s, peers, reduce, lambda: [work() for _ in range(times * runs)], rounds, tensor
        )
    lost = [compute_s(times, runs, beside=True) - compute_s(times, runs, beside=False) for _ in range(rounds)]
    return min(1.0, max(0.0, median(lost) / max(alone_s, lasting_s))) if alone_s > 0 else 0.0


def _share_of_processor(
    alone_s: float,
    peers: Peers,
    reduce: Callable[[], None],
    compute: Callable[[], object],
    rounds: int,
    tensor: torch.Tensor,
) -> float:
    """Seconds that the processor's work of a collective of ``alone_s`` takes from computing, a second."""
    processor, spent = ProcessorClock(), []
    for _ in range(2 * rounds):
        tensor.zero_()  # as a backward leaves it: in the caches of this rank
        peers.barrier()
        start = processor.mark()
        reduce()
        spent.append(processor.seconds(start, processor.mark()))
    part = rate_of(compute)
    return fmean(spent) / (part * alone_s) if alone_s > 0 and part > 0 else 0.0


# What exchanges cost devices that have one every few milliseconds and compute in between, as those of a sharded stage do.
#
# One after the other, exchanges show less: devices that are throttled, or whose clocks and neighbours make them hiccup, come to them at
# different moments, and all wait for the last. Taken by itself, an exchange among computing shows more: who waits for it computes faster
# afterwards, a throttled processor from what it has saved, a hot one from its clock. So each device computes with and without exchanges in
# between, for about as long between two of them by its own speed; what they add to the time of all is what they cost.
PART_BYTES: Final = (4 * 2**10, 2**20)
_ROUND_S: Final = 0.3
_LEAST_RUNS: Final = 3
_MOST_ROUNDS: Final = 9
_LEAST_S: Final = 1e-7


def measure_exchanges(
    peers: Peers,
    process_group: ProcessGroup,
    devices: Sequence[str],
    bench: Workbench,
    *,
    budget_s: float = 5.0,
) -> tuple[LinkSample, ...]:
    """All-to-alls among all ranks of parts of the sizes `PART_BYTES`; the same result on every rank. Nothing for one rank.

    If the budget does not allow one round of each size, nothing is measured, and that is said.
    """
    if peers.world_size < 2:
        return ()
    rounds = min(_MOST_ROUNDS, int(budget_s / (len(PART_BYTES) * _ROUND_S)))
    if not rounds:
        bench.say("exchanges between stretches of computing were not measured: the time for measuring is used up")
        return ()
    clock = bench.stopwatch

    def elapsed_s(lengths: Sequence[float], exchanged: tuple[list[torch.Tensor], list[int]] | None) -> float:
        """Seconds of some computing, with an exchange behind each stretch or without."""
        peers.barrier()
        start = clock.mark()
        for length in lengths:
            compute(length)
            if exchanged is not None:
                process_group.all_to_all(*exchanged)()
        return clock.seconds(start, clock.mark())

    compute, chance = stretch(peers, bench), random.Random(bench.seed)
    exchanged, runs = [], []
    for size in PART_BYTES:
        parts = [torch.zeros(size // 4, device=bench.device)] * peers.world_size
        exchanged.append((parts, [size // 4] * peers.world_size))
        brief = (0.0,) * _LEAST_RUNS
        elapsed_s(brief, exchanged[-1])  # the first ones open connections
        each_s = elapsed_s(brief, exchanged[-1]) / _LEAST_RUNS
        runs.append(peers.broadcast_object(max(_LEAST_RUNS, round(_ROUND_S / (2 * BETWEEN_S + each_s))), 0))
    # The sizes take turns, so that a bad moment of the machine spoils few rounds of each, and the middle one is not among them.
    added: list[list[float]] = [[] for _ in PART_BYTES]
    for number in range(rounds):
        bench.progress("exchanges between stretches of computing", number + 1, rounds)
        for index in range(len(PART_BYTES)):
            lengths = [varied(chance) for _ in range(runs[index])]
            ranks = peers.all_gather_object((elapsed_s(lengths, None), elapsed_s(lengths, exchanged[index])))
            alone_s, together_s = (max(of_ranks) for of_ranks in zip(*ranks, strict=True))
            added[index].append(max(_LEAST_S, (together_s - alone_s) / runs[index]))
    samples = []
    for size, of_size in zip(PART_BYTES, added, strict=True):
        middle = median(of_size)
        low, _, high = quantiles(of_size, n=4, method="inclusive") if len(of_size) > 1 else (middle,) * 3
        samples.append(
            LinkSample(op="exchange", devices=tuple(devices), bytes=size, seconds=middle, spread=(high - low) / middle)
        )
    return tuple(samples)
