"""Sums over ranks of several hosts and several makers: exact, equal on all ranks in every bit, whatever the islands are."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch

from heterodyne.runtime.comm import communicator as module
from heterodyne.runtime.comm.communicator import Communicator
from multiprocess.pool import World

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def reduce_on_hosts(
    world: World, hosts: str, seed: int, links: list[float] | None = None
) -> list[tuple[bool, list[float]]]:
    """Sums of random sizes and dtypes, several at a time; whether each is right, and its first elements."""
    with mock.patch.object(module, "neighbourhood", return_value=(hosts[world.rank],)):
        communicator = Communicator(rank=world.rank, world_size=world.world_size, device=torch.device("cpu"))
    communicator.link_bandwidths = links
    group = communicator.process_group(range(world.world_size))
    assert group is not None
    assert (group._islands is not None) == (1 < len(set(hosts)) < len(hosts))
    draw, found = random.Random(seed), []
    for _ in range(6):
        sizes = [draw.choice((0, 1, 7, 20_000, draw.randint(1, 200_000))) for _ in range(3)]
        dtype = draw.choice(DTYPES)
        generator = torch.Generator().manual_seed(draw.randint(0, 2**30))
        of_ranks = [
            [torch.randint(-50, 50, (size,), generator=generator).to(dtype) for size in sizes]
            for _ in range(world.world_size)
        ]
        own = [tensor.clone() for tensor in of_ranks[world.rank]]
        if draw.random() < 0.5 and dtype == torch.float32:
            own = group.buffers([(size, dtype) for size in sizes])
            for buffer, values in zip(own, of_ranks[world.rank], strict=True):
                buffer.copy_(values)
        for work in [group.all_reduce(tensor, timed=True) for tensor in own]:
            work.wait()
        for number, tensor in enumerate(own):
            wanted = sum(of[number].double() for of in of_ranks).to(dtype)
            found.append((torch.equal(tensor, wanted), tensor[:3].tolist()))
    communicator.close()
    return found


@pytest.mark.parametrize("hosts", ["aab", "aaabbc", "ababac", "abc", "aaa"])
def test_sums_over_hosts_are_those_of_all(pool: Any, hosts: str) -> None:
    of_ranks = pool.run(len(hosts), reduce_on_hosts, hosts, 3)
    assert all(right for found in of_ranks for right, _ in found)


def test_sums_are_right_where_a_slow_host_is_no_home(pool: Any) -> None:
    of_ranks = pool.run(6, reduce_on_hosts, "aaabbc", 4, [20.0] * 3 + [40.0] * 2 + [80.0])
    assert all(right for found in of_ranks for right, _ in found)


def reduce_unlike(world: World, hosts: str) -> list[int]:
    """What rounding leaves of a sum, as bits."""
    with mock.patch.object(module, "neighbourhood", return_value=(hosts[world.rank],)):
        communicator = Communicator(rank=world.rank, world_size=world.world_size, device=torch.device("cpu"))
    group = communicator.process_group(range(world.world_size))
    assert group is not None
    tensor = torch.randn(50_000, generator=torch.Generator().manual_seed(world.rank))
    group.all_reduce(tensor).wait()
    found: list[int] = tensor.view(torch.int32).tolist()
    communicator.close()
    return found


def test_all_ranks_have_the_same_bits(pool: Any) -> None:
    first, *others = pool.run(5, reduce_unlike, "aabcc")
    assert all(other == first for other in others)


def reduce_on_devices(world: World, seed: int) -> list[bool]:
    communicator = Communicator(rank=world.rank, world_size=world.world_size, device=torch.device(world.device))
    group = communicator.process_group(range(world.world_size))
    assert group is not None
    assert group._islands is not None
    draw, found = random.Random(seed), []
    for _ in range(4):
        sizes = [draw.choice((1, 20_000, draw.randint(1, 100_000))) for _ in range(3)]
        generator = torch.Generator().manual_seed(draw.randint(0, 2**30))
        of_ranks = [
            [torch.randint(-50, 50, (size,), generator=generator).float() for size in sizes]
            for _ in range(world.world_size)
        ]
        own = [tensor.to(world.device, copy=True) for tensor in of_ranks[world.rank]]
        works = [group.all_reduce(tensor) for tensor in own]
        for work in works:
            work.wait()
        for number, tensor in enumerate(own):
            found.append(torch.equal(tensor.cpu(), sum(of[number] for of in of_ranks)))  # type: ignore[arg-type]
    communicator.close()
    return found


@pytest.mark.parametrize(
    "devices", [("vendor_a", "vendor_a", "vendor_b"), ("vendor_a", "cpu", "vendor_b", "cpu", "vendor_b")]
)
def test_sums_over_makers_are_those_of_all(pool: Any, devices: tuple[str, ...]) -> None:
    assert all(all(found) for found in pool.run(len(devices), reduce_on_devices, 1, devices=devices, timeout_s=120))
