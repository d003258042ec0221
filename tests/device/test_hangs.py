"""A rank that never comes to an exchange between accelerators, whose hosts do not wait for it, is named within the watchdog's bound."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from device.test_exactness import A
from heterodyne.processes import GAVE_UP_ON_A_PEER
from heterodyne.runtime.comm.p2p import P2P
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.liveness.device_queue import DeviceQueue
from heterodyne.runtime.rendezvous.distributed import init_distributed
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from heterodyne.runtime.worker import Worker
from multiprocess.crowd import Crowd
from multiprocess.misfortunes import FOREVER_S, QUICK
from multiprocess.models import build, captured
from multiprocess.pool import World, accelerator
from multiprocess.work import PipelineOf, StageOf, staged_worker

WARM_STEPS = 2  # in which the watchdog learns how long actions take


def train_and_hang(environment: WorkerEnvironment, kind: str, whose: int) -> None:
    """In the third step rank ``whose`` does not come to an exchange; the other one has its host read a result of it."""
    accelerator(A)
    torch.set_num_threads(1)
    graph = captured("gpt")
    ops = len(graph.ops)
    if kind == "split":
        stages = (StageOf(ops, (0, 1), (1, 1), kind="split"),)
        where, name = ProcessGroup, "all_gather"
    else:
        stages = (StageOf(ops // 2, (0,), (1,)), StageOf(ops, (1,), (1,)))
        where, name = P2P, "send"
    limits = replace(QUICK, stuck_s=1.0, stuck_factor=2.0)
    with init_distributed(environment, backend="gloo", timeout_s=60.0, limits=limits) as session:
        watchdog, device = session.watchdog, torch.device(A, 0)
        watchdog.follow(DeviceQueue(device))
        world = World(rank=environment.rank, world_size=2, devices=(A, A))
        with watchdog.phase("setting up"):
            case = build(graph, 4)
            worker: Worker = staged_worker(world, case, [PipelineOf((2, 2), stages)], "GPipe", watch=watchdog)
        for _ in range(WARM_STEPS):
            worker.step(case.batch)
        if environment.rank == whose:
            setattr(where, name, lambda *_, **__: time.sleep(FOREVER_S))
        worker.step(case.batch)


@pytest.mark.parametrize("kind", ["pipeline", "split"])
def test_who_never_comes_to_an_exchange_of_devices_is_named_with_its_action(kind: str) -> None:
    with Crowd() as crowd:
        workers = [crowd.start(train_and_hang, kind, 0, rank=rank, world_size=2) for rank in range(2)]
        assert [worker.wait() for worker in workers] == [1, GAVE_UP_ON_A_PEER], [worker.output for worker in workers]
        told = workers[1].output
    assert "rank 0 on " in told
    assert "hangs in 0F0" in told
    assert "rank 1 waits for it in " in told
    assert "on its device (its host in " in told
