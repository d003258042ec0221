"""Unequal ranges go round a ring: the sums are right, every rank sends all but its own range, and gets what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from heterodyne.runtime.comm import ring
from heterodyne.runtime.comm.process_group import ProcessGroup
from multiprocess.pool import Pool, World

CPU = torch.device("cpu")
CASES = [
    (5, 2),
    (0, 7, 1),
    (4, 0, 0, 9),
    (1, 1, 1, 1, 1),
    (0, 0, 3),
    (300_000, 10, 77_777),
    (1, 200_000, 400_000, 50_000),
]


def counted(sent: list[int]) -> Callable[..., Any]:
    send = dist.isend

    def counting(tensor: torch.Tensor, **where: Any) -> Any:
        sent.append(tensor.numel())
        return send(tensor, **where)

    return counting


def ranges_of(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    borders = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    return list(pairwise(borders))


def around(world: World, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """The own sums, everything gathered, and how many elements were sent for each."""
    group = dist.new_group(list(range(world.world_size)), backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    process_group = ProcessGroup(range(world.world_size), group, device=CPU, via_host=False)
    flat = torch.arange(sum(sizes), dtype=torch.float32) + 1000 * world.rank
    scattered: list[int] = []
    gathered: list[int] = []
    send = ring.dist.isend
    try:
        ring.dist.isend = counted(scattered)
        process_group.reduce_scatter_ranges(flat, ranges_of(sizes)).wait()
        ring.dist.isend = send
        low, high = ranges_of(sizes)[world.rank]
        own = flat[low:high].clone()
        ring.dist.isend = counted(gathered)
        process_group.all_gather_ranges(flat, ranges_of(sizes)).wait()
    finally:
        ring.dist.isend = send
        process_group.close()
    return own, flat, sum(scattered), sum(gathered)


@pytest.mark.parametrize("sizes", CASES)
def test_ranges_are_summed_and_gathered_with_no_byte_too_many(pool: Pool, sizes: tuple[int, ...]) -> None:
    ranks, total = len(sizes), sum(sizes)
    expected = ranks * torch.arange(total, dtype=torch.float32) + 1000 * sum(range(ranks))
    for rank, (own, flat, scattered, gathered) in enumerate(pool.run(ranks, around, sizes)):
        low, high = ranges_of(sizes)[rank]
        torch.testing.assert_close(own, expected[low:high])
        assert torch.allclose(flat, expected)
        assert scattered == total - sizes[rank]
        assert gathered == total - sizes[(rank + 1) % ranks]


def shared(world: World, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in shared memory, sums of fp32 and a gather of bf16 in the same buffer."""
    from heterodyne.runtime.comm.communicator import Communicator

    with Communicator(rank=world.rank, world_size=world.world_size, device=CPU) as communicator:
        process_group = communicator.process_group(range(world.world_size))
        assert process_group is not None
        (flat,) = process_group.buffers([(sum(sizes), torch.float32)])
        flat.copy_(torch.arange(sum(sizes), dtype=torch.float32) + 1000 * world.rank)
        process_group.reduce_scatter_ranges(flat, ranges_of(sizes)).wait()
        low, high = ranges_of(sizes)[world.rank]
        own = flat[low:high].clone()
        narrow = flat.view(torch.bfloat16)[: flat.numel()]
        narrow[low:high] = world.rank + 1
        process_group.all_gather_ranges(narrow, ranges_of(sizes)).wait()
        return own, narrow.clone()


def through_rooms(world: World, sizes: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same of tensors that lie in no shared memory, through rooms that are smaller than some; all begun before any is awaited."""
    from heterodyne.runtime.comm.communicator import Communicator

    with Communicator(rank=world.rank, world_size=world.world_size, device=CPU) as communicator:
        process_group = communicator.process_group(range(world.world_size))
        assert process_group is not None
        process_group.share_ranges(100_000)
        assert process_group._rooms is not None
        low, high = ranges_of(sizes)[world.rank]
        flats = [torch.arange(sum(sizes), dtype=dtype) + 1000 * world.rank for dtype in (torch.float32, torch.float64)]
        for pending in [process_group.reduce_scatter_ranges(flat, ranges_of(sizes)) for flat in flats]:
            pending.wait()
        own = [flat[low:high].clone() for flat in flats]
        for pending in [process_group.all_gather_ranges(flat, ranges_of(sizes)) for flat in flats]:
            pending.wait()
        return list(zip(own, flats, strict=True))


@pytest.mark.parametrize("sizes", CASES)
def test_what_comes_and_goes_takes_rooms(pool: Pool, sizes: tuple[int, ...]) -> None:
    ranks = len(sizes)
    for rank, found in enumerate(pool.run(ranks, through_rooms, sizes)):
        low, high = ranges_of(sizes)[rank]
        for own, flat in found:
            expected = ranks * torch.arange(sum(sizes), dtype=flat.dtype) + 1000 * sum(range(ranks))
            assert torch.equal(own, expected[low:high])
            assert torch.equal(flat, expected)


@pytest.mark.parametrize("sizes", CASES)
def test_neighbours_do_the_same_in_shared_memory(pool: Pool, sizes: tuple[int, ...]) -> None:
    ranks, total = len(sizes), sum(sizes)
    expected = ranks * torch.arange(total, dtype=torch.float32) + 1000 * sum(range(ranks))
    of_rank = torch.cat([torch.full((size,), rank + 1.0) for rank, size in enumerate(sizes)])
    for rank, (own, narrow) in enumerate(pool.run(ranks, shared, sizes)):
        low, high = ranges_of(sizes)[rank]
        torch.testing.assert_close(own, expected[low:high])
        assert torch.equal(narrow.float(), of_rank)
