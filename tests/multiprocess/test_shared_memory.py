"""Neighbours sum in shared memory what gloo would sum over sockets: the same values, in order of rank, on every rank alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from heterodyne.runtime.comm import shared_memory
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.comm.process_group import ProcessGroup
from multiprocess.pool import Pool, World

SIZES = [(1, torch.float32), (7, torch.float64), (200_001, torch.float32), (3, torch.bfloat16), (0, torch.float32)]

pytestmark = pytest.mark.skipif(shared_memory.neighbourhood() is None, reason="this system has no memfd")


def values(rank: int, size: tuple[int, torch.dtype], turn: int) -> Tensor:
    elements, dtype = size
    return torch.randn(elements, generator=torch.Generator().manual_seed(100 * turn + rank)).to(dtype)


@contextmanager
def joined(world: World) -> Iterator[ProcessGroup]:
    with Communicator(rank=world.rank, world_size=world.world_size, device=torch.device("cpu")) as communicator:
        process_group = communicator.process_group(range(world.world_size))
        assert process_group is not None
        yield process_group


def sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float() if parts[0].dtype == torch.bfloat16 else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def summed(world: World, turns: int) -> list[list[Tensor]]:
    """The sums of all buffers, started one after the other before any is waited for; as often as there are turns."""
    with joined(world) as process_group:
        buffers = process_group.buffers(SIZES)
        assert all(not b.any() for b in buffers)
        results = []
        for turn in range(turns):
            for buffer, size in zip(buffers, SIZES, strict=True):
                buffer.copy_(values(world.rank, size, turn))
            pending = [process_group.all_reduce(buffer) for buffer in buffers]
            for work in pending:
                work.wait()
            results.append([buffer.clone() for buffer in buffers])
        return results


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_has_the_sum_in_order_of_rank_bit_for_bit(pool: Pool, size: int) -> None:
    for results in pool.run(size, summed, 3):
        for turn, result in enumerate(results):
            for buffer, kind in zip(result, SIZES, strict=True):
                expected = sum_in_order([values(rank, kind, turn) for rank in range(size)])
                assert torch.equal(buffer, expected)


def mixed(world: World) -> tuple[float, float, float]:
    """A buffer, a tensor that is none, and a buffer again, started without a wait between them."""
    with joined(world) as process_group:
        first, last = process_group.buffers([(4, torch.float32), (4, torch.float32)])
        plain = torch.full((4,), 10.0)
        first.fill_(1)
        last.fill_(100)
        for work in [process_group.all_reduce(t) for t in (first, plain, last)]:
            work.wait()
        return first[0].item(), plain[0].item(), last[3].item()


def test_buffers_and_other_tensors_keep_their_order(pool: Pool) -> None:
    assert pool.run(3, mixed) == [(3.0, 30.0, 300.0)] * 3


def held(world: World) -> tuple[bool, int]:
    """Whether the own buffers are summed in memory, and the bytes that are borrowed."""
    with joined(world) as process_group:
        (buffer,) = process_group.buffers([(1200, torch.float32)])
        process_group.all_reduce(buffer).wait()
        return bool(process_group._shared), process_group.borrowed_bytes


def test_what_is_borrowed_is_counted(pool: Pool) -> None:
    size = 3
    own_slice = 1200 * 4 // size
    assert pool.run(size, held) == [(True, (size - 1) * own_slice)] * size


def no_room(*_: object) -> None:
    raise OSError("there is no room")


def one_without_room(world: World) -> tuple[bool, float]:
    """Rank 1 cannot have its memory."""
    with joined(world) as process_group, pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr("os.posix_fallocate", no_room)
        (buffer,) = process_group.buffers([(8, torch.float32)])
        buffer.fill_(world.rank)
        process_group.all_reduce(buffer).wait()
        return bool(process_group._shared), buffer[7].item()


def test_without_room_on_one_rank_all_take_sockets(pool: Pool) -> None:
    assert pool.run(3, one_without_room) == [(False, 3.0)] * 3


def elsewhere(world: World) -> tuple[bool, float]:
    """Each rank says that it is on another machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heterodyne.runtime.comm.communicator.neighbourhood", lambda: (str(world.rank),))
        with joined(world) as process_group:
            (buffer,) = process_group.buffers([(8, torch.float32)])
            buffer.fill_(1)
            process_group.all_reduce(buffer).wait()
            return bool(process_group._shared), buffer[0].item()


def test_workers_of_different_machines_take_sockets(pool: Pool) -> None:
    assert pool.run(2, elsewhere) == [(False, 2.0)] * 2
