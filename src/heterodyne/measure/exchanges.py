"""What exchanges cost devices that have one every few milliseconds and compute in between, as those of a sharded stage do.

One after the other, exchanges show less: devices that are throttled, or whose clocks and neighbours make them hiccup, come to them at
different moments, and all wait for the last. Taken by itself, an exchange among computing shows more: who waits for it computes faster
afterwards, a throttled processor from what it has saved, a hot one from its clock. So each device computes with and without exchanges in
between, for about as long between two of them by its own speed; what they add to the time of all is what they cost.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Final

import torch

from heterodyne.cluster.profile import LinkSample
from heterodyne.measure.beside import BETWEEN_S, stretch, varied
from heterodyne.measure.peers import Peers, ProcessGroup
from heterodyne.measure.workbench import Workbench

__all__ = ["PART_BYTES", "measure_exchanges"]

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
