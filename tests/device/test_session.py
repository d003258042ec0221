"""Which accelerator is whose, what is known of it, and how long its collectives may take."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from device.strict import StrictGroup
from heterodyne.measure.discover import local_accelerators
from heterodyne.runtime.meeting.communicator import Communicator
from multiprocess.pool import Pool, World

A, B = "vendor_a", "vendor_b"


def described(world: World) -> list[tuple[str, int]]:
    """As the device describes itself; and as Apple's do, which have a limit and no properties."""
    module: Any = torch.get_device_module(world.device)
    found = [(d.kind, d.memory_bytes) for d in local_accelerators("here")]
    properties = vars(module).pop("get_device_properties")
    module.recommended_max_memory = lambda: 2**29
    try:
        return [*found, *((d.kind, d.memory_bytes) for d in local_accelerators("here"))]
    finally:
        del module.recommended_max_memory
        module.get_device_properties = properties


def test_devices_are_found_with_and_without_properties(pool: Pool) -> None:
    assert pool.run(1, described, devices=(A,)) == [[("Test-vendor_a", 2**30), (A, 2**29)]]


def timeouts(world: World) -> tuple[timedelta, set[timedelta]]:
    """Of the default group, and of those that are made for a job."""
    with Communicator(rank=world.rank, world_size=world.world_size, device=torch.device(world.device)) as communicator:
        communicator.channel(range(world.world_size))
        communicator.mail()
        default, *made = (timeout_of(group) for group in dist.distributed_c10d._world.pg_map)
        return default, set(made)


def timeout_of(group: Any) -> timedelta:
    if isinstance(group, StrictGroup):
        return group.timeout
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found


def test_every_group_waits_as_long_as_the_default_one(pool: Pool) -> None:
    for devices in ((A, A), ("cpu", A, B)):
        for default, made in pool.run(len(devices), timeouts, devices=devices):
            assert made == {default}
