"""All-to-alls through shared memory: what everyone has sent arrives, whatever the sizes; and a death is heard."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from heterodyne.errors import WorkerError
from heterodyne.runtime.comm.shared_exchange import SharedExchange
from multiprocess.pool import Pool, RemoteError, World

SIZES = st.sampled_from((0, 0, 1, 7, 1000, 262_143, 262_144, 262_145, 900_001))


def gather(value: object) -> list[object]:
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def part(source: int, to: int, size: int, call: int) -> torch.Tensor:
    return (torch.arange(size, dtype=torch.float32) * (source + 1) + to) % (97 + call)


def exchanged(world: World, calls: list[list[list[int]]]) -> list[bool]:
    """Whether each call brought what the others have sent. ``calls[c][i][j]``: elements from rank i to rank j."""
    exchange = SharedExchange.allocate(world.world_size, world.rank, gather)
    assert exchange is not None
    found = []
    for call, sizes in enumerate(calls):
        parts = [part(world.rank, to, size, call) for to, size in enumerate(sizes[world.rank])]
        received = exchange.all_to_all(parts, [row[world.rank] for row in sizes])()
        expected = [part(source, world.rank, row[world.rank], call) for source, row in enumerate(sizes)]
        found.append(all(torch.equal(a, b) for a, b in zip(received, expected, strict=True)))
    dist.barrier()
    exchange.close()
    return found


@settings(
    max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate)
)
@given(data=st.data(), world=st.integers(2, 4))
def test_everything_arrives(pool: Pool, data: st.DataObject, world: int) -> None:
    row = st.lists(SIZES, min_size=world, max_size=world)
    calls = data.draw(st.lists(st.lists(row, min_size=world, max_size=world), min_size=1, max_size=4))
    for found in pool.run(world, exchanged, calls):
        assert all(found)


def exchanged_at_once(world: World, calls: list[list[list[int]]], order: list[int]) -> list[bool]:
    """The same, all begun before any is waited for, in some order."""
    exchange = SharedExchange.allocate(world.world_size, world.rank, gather)
    assert exchange is not None
    begun = [
        exchange.all_to_all(
            [part(world.rank, to, size, call) for to, size in enumerate(sizes[world.rank])],
            [row[world.rank] for row in sizes],
        )
        for call, sizes in enumerate(calls)
    ]
    found = {}
    for call in order:
        expected = [part(source, world.rank, row[world.rank], call) for source, row in enumerate(calls[call])]
        found[call] = all(torch.equal(a, b) for a, b in zip(begun[call](), expected, strict=True))
    dist.barrier()
    exchange.close()
    return list(found.values())


def one_element_of_a_column(world: World) -> list[float]:
    """It lies in one piece whatever its stride, which need not be 1."""
    exchange = SharedExchange.allocate(world.world_size, world.rank, gather)
    assert exchange is not None
    column = torch.arange(3.0, dtype=torch.float64).view(1, 3)[:, world.rank]
    assert column.stride() == (3,)
    received = exchange.all_to_all([column] * world.world_size, [1] * world.world_size)()
    dist.barrier()
    exchange.close()
    return [value.item() for value in received]


@settings(
    max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate)
)
@given(data=st.data(), world=st.integers(2, 4))
def test_several_may_have_begun_and_are_waited_for_in_any_order(pool: Pool, data: st.DataObject, world: int) -> None:
    row = st.lists(SIZES, min_size=world, max_size=world)
    calls = data.draw(st.lists(st.lists(row, min_size=world, max_size=world), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(calls))))
    for found in pool.run(world, exchanged_at_once, calls, order):
        assert all(found)


def test_one_element_has_any_stride(pool: Pool) -> None:
    assert pool.run(2, one_element_of_a_column) == [[0.0, 1.0]] * 2


def left_alone(world: World) -> str:
    exchange = SharedExchange.allocate(world.world_size, world.rank, gather)
    assert exchange is not None
    if world.rank == 1:
        os._exit(0)
    try:
        exchange.all_to_all([torch.ones(8)] * 2, [8, 8])()
    except WorkerError as error:
        raise ValueError(f"heard: {error}") from error
    return "nothing heard"


def test_a_death_is_heard(pool: Pool) -> None:
    with pytest.raises(RemoteError, match="heard: a collective broke off"):
        pool.run(2, left_alone, timeout_s=20.0)
