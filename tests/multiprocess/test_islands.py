"""Sums over ranks of several hosts and several makers: exact, equal on all ranks in every bit, whatever the islands are."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch

from heterodyne.cluster.spec import Link
from heterodyne.runtime.comm import communicator as module
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.comm.work import Work
from multiprocess.pool import World

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
COPIED = (*DTYPES, torch.int16, torch.uint16, torch.bool, torch.complex64)  # what is not added up


def linked(rates: list[float] | None) -> list[Link] | None:
    return rates and [Link(between=("here", "there"), bandwidth_bytes_per_s=each, latency_s=1e-3) for each in rates]  # type: ignore[return-value]


def reduce_on_hosts(
    world: World, hosts: str, seed: int, rates: list[float] | None = None
) -> list[tuple[bool, list[float]]]:
    """Sums of random sizes and dtypes, several at a time; whether each is right, and its first elements."""
    with mock.patch.object(module, "neighbourhood", return_value=(hosts[world.rank],)):
        communicator = Communicator(rank=world.rank, world_size=world.world_size, device=torch.device("cpu"))
    communicator.links = linked(rates)
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
    of_ranks = pool.run(6, reduce_on_hosts, "aaabbc", 4, [20e6] * 3 + [40e6] * 2 + [80e6])
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


def collect(world: World, hosts: str, seed: int, rates: list[float] | None) -> list[tuple[str, bool]]:
    """Collectives of random kinds, sizes, ranges and dtypes, several at a time; whether each is right."""
    own_device = torch.device(world.device)
    with mock.patch.object(module, "neighbourhood", return_value=(hosts[world.rank],)):
        communicator = Communicator(rank=world.rank, world_size=world.world_size, device=own_device)
    communicator.links = linked(rates)
    group = communicator.process_group(range(world.world_size))
    assert group is not None
    assert group._islands is not None
    draw, found = random.Random(seed), []
    for _ in range(8):
        dtype = draw.choice(DTYPES)
        begun = []
        for _ in range(draw.randint(1, 3)):
            kind = draw.choice(("all_reduce", "reduce_scatter", "all_gather", "broadcast"))
            size = draw.choice((1, 7, 20_000, draw.randint(1, 200_000)))
            ends = sorted(draw.choices(range(size + 1), k=world.world_size - 1))
            ranges = list(pairwise([0, *ends, size]))
            generator = torch.Generator().manual_seed(draw.randint(0, 2**30))
            values = torch.randint(-50, 50, (world.world_size, size), generator=generator).to(dtype)
            total, source = values.double().sum(0).to(dtype), draw.randrange(world.world_size)
            tensor = values[world.rank].to(own_device, copy=True)
            whole = slice(0, size)
            if kind == "all_reduce":
                begun.append((kind, group.all_reduce(tensor), tensor, total, whole))
            elif kind == "reduce_scatter":
                work = group.reduce_scatter_ranges(tensor, ranges)
                begun.append((kind, work, tensor, total, slice(*ranges[world.rank])))
            elif kind == "all_gather":
                parts = torch.cat([values[rank, start:stop] for rank, (start, stop) in enumerate(ranges)])
                begun.append((kind, group.all_gather_ranges(tensor, ranges, timed=True), tensor, parts, whole))
            else:
                for _, work, *_ in begun:
                    work.wait()  # a broadcast blocks
                copied = values.to(draw.choice(COPIED))
                values, tensor = copied, copied[world.rank].to(own_device, copy=True)
                group.broadcast(tensor, source)
                begun.append((kind, Work(), tensor, values[source], whole))
        for kind, work, tensor, wanted, part in begun:
            work.wait()
            found.append((kind, torch.equal(tensor[part].cpu(), wanted[part])))
    communicator.close()
    return found


@pytest.mark.parametrize(
    ("hosts", "devices", "rates"),
    [
        ("aab", None, None),
        ("aaabbc", None, [20e6] * 3 + [40e6] * 2 + [80e6]),
        ("ababac", None, [20e6, 1e9] * 2 + [20e6, 80e6]),
        ("abccc", ("vendor_a", "vendor_a", "cpu", "cpu", "cpu"), None),
        ("abcde", ("vendor_a", "cpu", "vendor_b", "vendor_a", "vendor_b"), [1e9, 1e7, 1e8, 1e9, 1e8]),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_collectives_over_islands_are_right(
    pool: Any, hosts: str, devices: tuple[str, ...] | None, rates: list[float] | None, seed: int
) -> None:
    for found in pool.run(len(hosts), collect, hosts, seed, rates, devices=devices, timeout_s=120):
        assert all(right for _, right in found), [kind for kind, right in found if not right]
