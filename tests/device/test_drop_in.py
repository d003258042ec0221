"""What the drop-in for DDP needs of devices: sums through the host that come back as a future, and a backend in common."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import heterodyne as hd
from device.test_exactness import CPU, A, B
from heterodyne.runtime.comm.communicator import Communicator
from multiprocess.pool import Pool, World


def added_up(world: World) -> tuple[list[float], int]:
    """Some sums, each begun before the ones before it are waited for; and how often it was told that one is there."""
    device = torch.device(world.device)
    told: list[None] = []
    with Communicator(rank=world.rank, world_size=world.world_size, device=device) as communicator:
        process_group = communicator.process_group(range(world.world_size))
        assert process_group is not None
        futures = [
            process_group.all_reduce_future(
                torch.full((1000,), world.rank + k, device=device).float(), lambda: told.append(None)
            )
            for k in range(5)
        ]
        return [float(future.wait().sum()) / 1000 for future in futures], len(told)


@pytest.mark.parametrize("devices", [(A, CPU), (CPU, A, B), (CPU, CPU)], ids="+".join)
def test_a_sum_comes_as_a_future(pool: Pool, devices: tuple[str, ...]) -> None:
    ranks = len(devices)
    expected = [sum(range(ranks)) + k * ranks for k in range(5)]
    assert pool.run(ranks, added_up, devices=devices) == [(expected, 5)] * ranks


def refused(world: World) -> str:
    with pytest.raises(hd.HeterodyneError) as caught:
        hd.DistributedDataParallel(nn.Linear(2, 2).to(world.device))
    return str(caught.value)


def test_devices_without_a_backend_are_refused(pool: Pool) -> None:
    for said in pool.run(2, refused, devices=(A, A)):
        assert "on vendor_a" in said
        assert "no backend (cpu:gloo)" in said or "no backend (gloo)" in said
