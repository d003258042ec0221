"""What a place holds, by the orders themselves."""

from __future__ import annotations

import random

import pytest

from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.held import peak_bytes
from heterodyne.plan.schedules.held_counts import held_at_most
from heterodyne.plan.schedules.times import StageBytes

INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "ZBH1", "ZBH2", *INTERLEAVED])
def test_what_is_held_is_what_the_orders_hold_for_any_count(schedule: str) -> None:
    chance = random.Random(1)
    for places in range(1, 7):
        for chunks in (1, 2, 3) if schedule in INTERLEAVED and places > 1 else (1,):
            for count in (*range(1, 4 * places + 6), chance.randint(40, 80), 8 * places, 100):
                sizes = [chance.randint(1, 1000) for _ in range(places * chunks)]
                counted = peak_bytes(
                    SCHEDULES[schedule].orders(places, chunks, count), [StageBytes(activation=own) for own in sizes]
                )
                told = [
                    max(sum(n * own for n, own in zip(v, sizes[place::places], strict=True)) for v in vectors)
                    for place, vectors in enumerate(held_at_most(schedule, places, chunks, count))
                ]
                assert told == list(counted), (places, chunks, count)
