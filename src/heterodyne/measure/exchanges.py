"""What it adds to computing that devices exchange something every few milliseconds, as those of a stage in parts do.

An exchange by itself, one after the other, shows less: devices that are throttled, or whose clocks and neighbours make them hiccup, come
to it at different moments, and all wait for the last of them. So each device computes for about as long between two exchanges, by its
own speed, and what the exchanges add to that is what they cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Final

import torch

from heterodyne.cluster.profile import LinkSample
from heterodyne.measure.links import matrix_product
from heterodyne.measure.peers import Channel, Peers
from heterodyne.measure.workbench import Workbench
from heterodyne.units import format_bytes

__all__ = ["PART_BYTES", "measure_exchanges"]

PART_BYTES: Final = (4 * 2**10, 256 * 2**10)
_BETWEEN_S: Final = 0.01
_RUNS: Final = 25
_MOST_ROUNDS: Final = 5
_GUESS: Final = 10
_LEAST_S: Final = 1e-7


def measure_exchanges(
    peers: Peers,
    channel: Channel,
    devices: Sequence[str],
    bench: Workbench,
    *,
    part_bytes: Sequence[int] = PART_BYTES,
    budget_s: float = 5.0,
) -> tuple[LinkSample, ...]:
    """All-to-alls among all ranks of parts of these sizes; the same result on every rank. Nothing for one rank.

    A sample says what one exchange adds for the slowest rank. If the budget does not allow one round, nothing is measured, and that is
    said.
    """
    if peers.world_size < 2:
        return ()
    rounds = min(_MOST_ROUNDS, int(budget_s / (2 * len(part_bytes) * _RUNS * _BETWEEN_S)))
    if not rounds:
        bench.say("exchanges between stretches of computing were not measured: the time for measuring is used up")
        return ()
    clock = bench.stopwatch
    work = matrix_product(bench.device)

    def stretches_s(times: int, runs: int, exchanged: tuple[list[torch.Tensor], list[int]] | None) -> float:
        """Seconds of ``times`` computations and an exchange, the mean of ``runs``."""
        peers.barrier()
        start = clock.mark()
        for _ in range(runs):
            for _ in range(times):
                work()
            if exchanged is not None:
                channel.all_to_all(*exchanged)()
        return clock.seconds(start, clock.mark()) / runs

    some = max(1, round(bench.sampling.sample_s / max(stretches_s(_GUESS, 1, None) / _GUESS, 1e-6)))
    times = max(1, round(_BETWEEN_S * some / max(stretches_s(some, 1, None), 1e-6)))
    samples = []
    for index, size in enumerate(part_bytes):
        bench.progress(f"exchanges of {format_bytes(size)}", index + 1, len(part_bytes))
        parts = [torch.zeros(size // 4, device=bench.device)] * peers.world_size
        exchanged = (parts, [size // 4] * peers.world_size)
        stretches_s(1, 3, exchanged)  # the first ones open connections
        added = []
        for _ in range(rounds):
            alone, together = stretches_s(times, _RUNS, None), stretches_s(times, _RUNS, exchanged)
            alone_s, together_s = (max(each) for each in zip(*peers.all_gather_object((alone, together)), strict=True))
            added.append(max(_LEAST_S, together_s - alone_s))
        middle = median(added)
        low, _, high = quantiles(added, n=4, method="inclusive") if len(added) > 1 else (middle,) * 3
        samples.append(
            LinkSample(op="exchange", devices=tuple(devices), bytes=size, seconds=middle, spread=(high - low) / middle)
        )
    return tuple(samples)
