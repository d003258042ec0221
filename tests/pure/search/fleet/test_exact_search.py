"""The exact search over few devices against all sequences of stage kinds and all cuts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest

from heterodyne.search.fleet.exact_search import ExactSearch
from heterodyne.search.fleet.kinds import Kind, kinds_of
from heterodyne.search.fleet.space import Space
from pure.search.fleet.small import drawn, search_of

ROUNDS = (1, 3, 20)


@pytest.mark.tour("search/fleet/")
@pytest.mark.parametrize("number", range(10))
def test_no_sequence_of_stages_and_no_cut_is_done_sooner(number: int) -> None:
    search = _search_of(number)
    if search is None:
        return
    found = search.found(1)
    kept = {
        (tuple(devices), rounds): seconds
        for devices, rounds, seconds in zip(
            found.devices.tolist(), found.number.tolist(), found.seconds.tolist(), strict=True
        )
    }
    least: dict[tuple[tuple[int, ...], int], float] = {}
    for chain in _chains(search, []):
        used = tuple(sum(k.devices for k in chain if k.pool == pool) for pool in range(len(search.room)))
        for at, rounds in enumerate(ROUNDS):
            seconds = min(_seconds(search, chain, cut, rounds) for cut in _cuts(chain))
            if seconds < np.inf:
                least[used, at] = min(seconds, least.get((used, at), np.inf))
    assert kept == pytest.approx(least)


@pytest.mark.parametrize("number", range(10))
def test_chains_are_on_the_devices_that_are_told(number: int) -> None:
    search = _search_of(number)
    if search is None:
        return
    found = search.found(3)
    for devices, stages, kind, rounds, bottleneck_s, seconds in zip(
        *(getattr(found, name).tolist() for name in ("devices", "stages", "kind", "number", "bottleneck_s", "seconds")),
        strict=True,
    ):
        chain = [search.kinds[own] for own in search.chain(tuple(devices), stages, kind, rounds)]
        assert len(chain) == stages
        assert search.kinds[kind] is chain[0]
        assert [sum(k.devices for k in chain if k.pool == pool) for pool in range(len(search.room))] == devices
        least = min(_seconds(search, chain, cut, ROUNDS[rounds]) for cut in _cuts(chain))
        assert seconds == pytest.approx(least)
        assert ROUNDS[rounds] * bottleneck_s <= seconds * (1 + 1e-9)


def _search_of(number: int) -> ExactSearch | None:
    fleet, costs, samples = drawn(random.Random(number), devices=4, blocks=3, ways=1 + number % 3)
    search = search_of(fleet, costs, samples)
    kinds = kinds_of(fleet, search.tables, 2, Space())
    if not kinds:
        return None
    return ExactSearch(
        kinds=kinds,
        room=np.array([pool.devices for pool in fleet.pools]),
        micro_batches=ROUNDS,
        max_stages=4,
        max_pools=2 if number % 2 else None,
        replicas=1 + number % 2,
        zero=1,
        recompute=number % 3 > 0,
        waits_s=[0.1 * (number % 2)] * len(kinds),
    )


def _chains(search: ExactSearch, chain: list[Kind]) -> Iterator[list[Kind]]:
    if chain:
        yield chain
    for kind in search.kinds:
        longer = [*chain, kind]
        used = [sum(k.devices for k in longer if k.pool == pool) for pool in range(len(search.room))]
        pools = sum(map(bool, used))
        fits = all(own <= room for own, room in zip(used, search.room.tolist(), strict=True))
        if fits and pools <= (search.max_pools or pools) and len(longer) <= min(4, len(kind.table.costs)):
            yield from _chains(search, longer)


def _cuts(chain: list[Kind]) -> Iterator[tuple[int, ...]]:
    layers = len(chain[0].table.costs)
    for cut in combinations(range(1, layers), len(chain) - 1):
        yield (0, *cut, layers)


def _seconds(search: ExactSearch, chain: list[Kind], cut: tuple[int, ...], rounds: int) -> float:
    behind = 0.0
    for place, (kind, (start, stop)) in enumerate(zip(chain[::-1], list(pairwise(cut))[::-1], strict=True), 1):
        ways = [np.inf]
        for again in (False, True):
            need = kind.table.memory(
                start, stop, recompute=again, held=min(place, rounds), replicas=search.replicas, zero=search.zero
            )
            if need.total <= kind.memory_bytes and (search.recompute or not again):
                own_s = kind.table.forward_s(start, stop) + kind.table.backward_s(start, stop, again)
                ways.append(own_s + search.waits_s[0])
        behind = max(rounds * min(ways), min(ways) + behind)
    return behind
