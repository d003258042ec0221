"""The pool that every other test of this folder stands on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from multiprocess.pool import Pool, RemoteError, World


def add_up(world: World, base: float) -> float:
    total = torch.tensor(base + world.rank)
    if world.world_size > 1:
        dist.all_reduce(total)
    return total.item()


def process_id(world: World) -> int:
    return os.getpid()


def fail_on(world: World, rank: int) -> None:
    if world.rank == rank:
        raise ValueError("so it goes")
    dist.barrier()


def die_on(world: World, rank: int) -> None:
    if world.rank == rank:
        os._exit(7)
    dist.barrier()


def sleep_on(world: World, rank: int) -> None:
    if world.rank == rank:
        time.sleep(600)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_call_has_a_group_of_its_own_size(pool: Pool, size: int) -> None:
    expected = size * 10 + sum(range(size))
    assert pool.run(size, add_up, 10.0) == [expected] * size


def test_the_workers_stay(pool: Pool) -> None:
    assert pool.run(2, process_id) == pool.run(2, process_id)


@pytest.mark.parametrize(("function", "told"), [(fail_on, "so it goes"), (die_on, "exit status 7")])
def test_a_failure_is_told_and_the_next_call_works(pool: Pool, function: object, told: str) -> None:
    with pytest.raises(RemoteError, match=told):
        pool.run(2, function, 1)
    assert pool.run(2, add_up, 0.0) == [1.0, 1.0]


def test_a_stuck_worker_is_ended(pool: Pool) -> None:
    with pytest.raises(RemoteError, match=r"rank 1: no answer within 0\.5 s"):
        pool.run(2, sleep_on, 1, timeout_s=0.5)
    assert pool.run(2, add_up, 0.0) == [1.0, 1.0]


def test_closing_leaves_no_worker() -> None:
    pool = Pool()
    ids = pool.run(2, process_id)
    pool.close()
    for pid in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
