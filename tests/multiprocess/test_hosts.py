"""What is wrong between hosts is told before they train: on every rank, in one message, with who, where and what to do."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from heterodyne.emulate.network import WorkerNetwork, why_not, worker_networks
from heterodyne.processes import GAVE_UP_ON_A_PEER
from heterodyne.processes.status import TOLD
from heterodyne.runtime.rendezvous import distributed
from heterodyne.runtime.rendezvous.distributed import init_distributed
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from heterodyne.runtime.rendezvous.software import software, unlike
from multiprocess.crowd import Crowd, Worker
from multiprocess.misfortunes import say
from multiprocess.namespaces import enter

HOSTS = 3
PATIENCE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Misfortune:
    """What is wrong with the last host, if nothing else is said.

    Args:
        environment: what its launcher says otherwise; ``variables``: of its environment; ``software``: what it has of another version.
        lost: what these two hosts send to each other is.
        patience_s: how long to wait for ranks that do not come.
        told: what every rank that says anything says.
    """

    environment: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)
    lost: tuple[int, int] | None = None
    patience_s: float = PATIENCE_S
    told: str


def lose(networks: Sequence[WorkerNetwork], a: int, b: int) -> None:
    """Lead astray what two hosts send to each other, as a firewall does that drops it."""
    for one, other in ((a, b), (b, a)):
        astray = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        command = ["ip", "-n", networks[one].namespace, "neigh", "add", networks[other].address, *astray]
        subprocess.run(command, check=True)


MISFORTUNES = {
    "two islands": Misfortune(
        lost=(1, 2),
        told=r"rank 1 on .* does not reach rank 2 on .* at 10\.254\.0\.\d+:\d+ \(timed out\); rank 2 on .*: open all ports between these",
    ),
    "an interface that is not there": Misfortune(
        variables={"GLOO_SOCKET_IFNAME": "ib7"},
        told=r"rank 2 on .*: GLOO_SOCKET_IFNAME=ib7, and there is no interface ib7: it takes the names of interfaces: eth0",
    ),
    "another torch": Misfortune(
        software={"torch": "2.12.1+cu130"},
        told=r"has torch \S+, and rank \d on .* has \S+: install one state of torch on both hosts",
    ),
    "another state of this package": Misfortune(
        software={"heterodyne": "0.1.0, files of elsewhere"},
        told=r"has heterodyne .*files .*, and rank \d on .* has .*files .*: install one state of heterodyne",
    ),
    "another number of ranks": Misfortune(
        environment={"world_size": 4},
        told=r"expects \d workers, and rank \d on .* expects \d: give all the same WORLD_SIZE",
    ),
    "the number of a host given twice": Misfortune(
        told=r"rank 1 is claimed twice: by .* and by .*; give each worker its own RANK"
    ),
    "a host that never comes": Misfortune(
        patience_s=8.0,
        told=r"rank 2 of 3 never came within 8 s \(here are ranks 0, 1 on .*\): .* whether their hosts reach 10\.254\.0\.\d+ at port \d+",
    ),
    "a firewall before the meeting point": Misfortune(
        lost=(0, 2),
        patience_s=8.0,
        told=r"rank 2 of 3 never came|found nobody at MASTER_ADDR:MASTER_PORT 10\.254\.0\.\d+:\d+ .* or the address or a firewall is wrong",
    ),
}

RANKS = {"the number of a host given twice": (0, 1, 1), "a host that never comes": (0, 1)}


def meet(environment: WorkerEnvironment, network: WorkerNetwork, master: str, name: str, last: bool) -> None:
    enter(network)
    environment = replace(
        environment,
        master_address=master,
        local_rank=0,
        local_world_size=1,
        node_rank=environment.rank,
    )
    misfortune = MISFORTUNES.get(name, Misfortune(told=""))
    if last:
        os.environ.update(misfortune.variables)
        environment = replace(environment, **misfortune.environment)
        distributed.software = lambda: {**software(), **misfortune.software}
    with init_distributed(environment, backend="gloo", timeout_s=misfortune.patience_s) as session:
        assert [member.rank for member in session.members] == list(range(HOSTS))
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == HOSTS
    say("done")


@pytest.fixture(scope="module")
def crowds() -> Iterator[dict[str, list[Worker]]]:
    """Hosts with each misfortune and hosts without one, all at a time."""
    if (reason := why_not(user=os.geteuid())) is not None:
        pytest.skip(reason)
    cases = {"none": Misfortune(told=""), **MISFORTUNES}
    found: dict[str, list[Worker]] = {}
    lossy = [name for name, misfortune in cases.items() if misfortune.lost is not None]
    with worker_networks([1e9] * HOSTS * (1 + len(lossy))) as networks, ExitStack() as stack:
        for name, misfortune in cases.items():
            number = 1 + lossy.index(name) if name in lossy else 0
            own = networks[number * HOSTS : (number + 1) * HOSTS]
            if misfortune.lost is not None:
                lose(own, *misfortune.lost)
            crowd = stack.enter_context(Crowd())
            hosts = list(enumerate(zip(own, RANKS.get(name, range(HOSTS)), strict=False)))
            found[name] = [
                crowd.start(meet, network, own[0].address, name, host == HOSTS - 1, rank=rank, world_size=HOSTS)
                for host, (network, rank) in reversed(hosts)
            ]
        yield found


def test_hosts_without_a_fault_meet(crowds: dict[str, list[Worker]]) -> None:
    workers = crowds["none"]
    assert [worker.wait() for worker in workers] == [0] * HOSTS, [worker.output for worker in workers]


@pytest.mark.parametrize("name", MISFORTUNES)
def test_every_rank_tells_the_same_fault(crowds: dict[str, list[Worker]], name: str) -> None:
    statuses = [worker.wait() for worker in crowds[name]]
    assert set(statuses) <= {TOLD, GAVE_UP_ON_A_PEER}
    told = [" ".join(worker.output.split()) for worker in crowds[name]]
    assert [bool(re.search(MISFORTUNES[name].told, text)) for text in told] == [True] * len(told), told


def test_builds_of_one_torch_for_several_makers_are_alike() -> None:
    of_nvidia, of_amd = ({"torch": f"2.13.0+{maker}", "heterodyne": "0.1.0, files a"} for maker in ("cu130", "rocm7.0"))
    assert not list(unlike(of_nvidia, of_amd))
    assert [name for name, *_ in unlike(of_nvidia, {"torch": "2.13.1"})] == ["torch", "heterodyne"]
