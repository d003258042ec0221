"""What exchanges cost devices that have one every few milliseconds and compute in between, as those of a sharded stage do.

One after the other, exchanges show less: devices that are throttled, or whose clocks and neighbours make them hiccup, come to them at
different moments, and all wait for the last. So each device computes for about as long between two exchanges, by its own speed. Who
is a little faster than the others waits for them at each; so the one that spends least time in its exchanges tells what they cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median, quantiles
from typing import Final

import torch

from heterodyne.cluster.profile import LinkSample
from heterodyne.measure.beside import BETWEEN_S, matrix_product, moment
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
    part_bytes: Sequence[int] = PART_BYTES,
    budget_s: float = 5.0,
) -> tuple[LinkSample, ...]:
    """All-to-alls among all ranks of parts of these sizes; the same result on every rank. Nothing for one rank.

    If the budget does not allow one round of each size, nothing is measured, and that is said.
    """
    if peers.world_size < 2:
        return ()
    rounds = min(_MOST_ROUNDS, int(budget_s / (len(part_bytes) * _ROUND_S)))
    if not rounds:
        bench.say("exchanges between stretches of computing were not measured: the time for measuring is used up")
        return ()
    clock = bench.stopwatch

    def exchange_s(compute: Callable[[], object], runs: int, exchanged: tuple[list[torch.Tensor], list[int]]) -> float:
        """Seconds of an exchange behind some computing, the mean of ``runs``: who hiccups makes the others wait in a step too."""
        peers.barrier()
        marks = []
        for _ in range(runs):
            compute()
            start = clock.mark()
            process_group.all_to_all(*exchanged)()
            marks.append((start, clock.mark()))
        return fmean(clock.seconds(start, stop) for start, stop in marks)

    brief, long = matrix_product(bench.device), moment(peers, bench)
    exchanged, runs = [], []
    for size in part_bytes:
        parts = [torch.zeros(size // 4, device=bench.device)] * peers.world_size
        exchanged.append((parts, [size // 4] * peers.world_size))
        exchange_s(brief, _LEAST_RUNS, exchanged[-1])  # the first ones open connections
        each_s = exchange_s(brief, _LEAST_RUNS, exchanged[-1])
        runs.append(peers.broadcast_object(max(_LEAST_RUNS, round(_ROUND_S / (BETWEEN_S + each_s))), 0))
    # The sizes take turns, so that a bad moment of the machine spoils few rounds of each, and the middle one is not among them.
    found: list[list[float]] = [[] for _ in part_bytes]
    for number in range(rounds):
        bench.progress("exchanges between stretches of computing", number + 1, rounds)
        for index in range(len(part_bytes)):
            found[index].append(exchange_s(long, runs[index], exchanged[index]))
    samples = []
    for size, of_size in zip(part_bytes, zip(*peers.all_gather_object(found), strict=True), strict=True):
        added = [max(_LEAST_S, min(of_ranks)) for of_ranks in zip(*of_size, strict=True)]
        middle = median(added)
        low, _, high = quantiles(added, n=4, method="inclusive") if len(added) > 1 else (middle,) * 3
        samples.append(
            LinkSample(op="exchange", devices=tuple(devices), bytes=size, seconds=middle, spread=(high - low) / middle)
        )
    return tuple(samples)
