"""Which accelerator is whose, what is known of it, and how long its collectives may take."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from device.strict import StrictGroup
from heterodyne.api.session import open_session
from heterodyne.measure.discover import local_accelerators
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from multiprocess.crowd import Crowd
from multiprocess.pool import Pool, World, accelerator

A, B = "vendor_a", "vendor_b"
FILED = "npu"  # one that a cluster file may name


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
        communicator.process_group(range(world.world_size))
        communicator.p2p()
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


def opened(environment: WorkerEnvironment, file: str | None) -> None:
    accelerator(FILED)  # has one device, and there are two workers
    os.environ.update(
        RANK=str(environment.rank),
        WORLD_SIZE=str(environment.world_size),
        LOCAL_RANK=str(environment.local_rank),
        LOCAL_WORLD_SIZE=str(environment.local_world_size),
        MASTER_ADDR=environment.master_address,
        MASTER_PORT=str(environment.master_port),
    )
    with open_session(None if file is None else Path(file)) as session:
        sys.stdout.write(f"{session.device.type}\n")


def test_a_worker_is_not_silently_left_to_its_cpu(tmp_path: Path) -> None:
    with Crowd() as crowd:
        workers = [crowd.start(opened, None, rank=rank, world_size=2) for rank in range(2)]
        for worker in workers:
            assert worker.wait()
            assert "has 2 workers and 1 accelerator that they see, so rank 1 would train on the CPU" in worker.output


def test_a_file_that_names_cpus_is_obeyed(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    devices = f"[{{kind: Test-{FILED}, backend: {FILED}, memory: 1 GiB}}, {{kind: cpu, memory: 1 GiB}}]"
    file.write_text(f"name: two\nnodes:\n  - {{name: here, devices: {devices}}}\n")
    with Crowd() as crowd:
        workers = [crowd.start(opened, str(file), rank=rank, world_size=2) for rank in range(2)]
        assert [worker.wait() for worker in workers] == [0, 0], workers[0].output
        assert [worker.output.splitlines()[-1] for worker in workers] == [FILED, "cpu"]
