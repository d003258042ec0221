"""Who does not have the run's secret runs nothing on its ranks: not through its store, and not as one of its ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs do not declare it

from heterodyne.emulate.network import WorkerNetwork, why_not, worker_networks
from heterodyne.errors import WorkerError
from heterodyne.runtime.comm.objects import Objects
from heterodyne.runtime.rendezvous.distributed import init_distributed
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from multiprocess.crowd import Crowd
from multiprocess.misfortunes import say
from multiprocess.namespaces import enter
from multiprocess.pool import Pool, World

KEY = b"the key of this run"


class Attack:
    """Whoever unpickles one makes a file."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._mark,)


def beside_a_stranger(world: World, mark: Path, verb: str, replays: bool) -> list[Any]:
    """What each rank reads in turn; the last of them, who is the stranger, sends an attack the second time."""
    stranger = world.rank == world.world_size - 1
    group = dist.group.WORLD
    objects = Objects(group, KEY)

    def exchange(value: Any) -> Any:
        return objects.gather(value) if verb == "gather" else objects.broadcast(value, world.world_size - 1)

    read: list[Any] = [exchange(world.rank)]
    if stranger:
        objects = Objects(group, KEY if replays else b"another key")
    try:
        read.append(exchange(Attack(mark) if stranger else "x" * 5000))
    except WorkerError as error:
        read.append((error.rank, str(error)))
    return [] if stranger else read  # a result is pickled too


@pytest.mark.parametrize("verb", ["gather", "broadcast"])
@pytest.mark.parametrize("replays", [False, True], ids=["another key", "an old number"])
def test_what_a_rank_has_not_signed_is_not_unpickled(pool: Pool, tmp_path: Path, verb: str, replays: bool) -> None:
    mark = tmp_path / "ran"
    found = pool.run(2, beside_a_stranger, mark, verb, replays)
    assert found[0][0] == ([0, 1] if verb == "gather" else 1)
    rank, text = found[0][1]
    assert rank == 1
    assert "rank 1 is not signed with the secret of this run, so it was not read" in text
    assert not mark.exists()


def sizes(world: World) -> list[list[int]]:
    objects = Objects(dist.group.WORLD, KEY)
    lengths = [0, 900, 1200, 3_000_000]
    gathered = [list(map(len, objects.gather(b"x" * (length * world.rank)))) for length in lengths]
    return [*gathered, [len(objects.broadcast(b"x" * length, world.world_size - 1)) for length in lengths]]


def test_objects_of_all_sizes_arrive(pool: Pool) -> None:
    lengths = [0, 900, 1200, 3_000_000]
    expected = [[0, length, 2 * length] for length in lengths] + [lengths]
    assert pool.run(3, sizes) == [expected] * 3


def met(environment: WorkerEnvironment, network: WorkerNetwork | None, folder: Path) -> None:
    """A worker that tells where it listens, waits for the stranger to end, and sees that all is as it was."""
    enter(network)
    address = environment.master_address if network is None else network.environment["MASTER_ADDR"]
    with init_distributed(replace(environment, master_address=address), backend="gloo", timeout_s=60.0) as session:
        objects = Objects(dist.group.WORLD, session.key)
        places = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        own = "127.0.0.1" if network is None else network.address
        of_all = objects.gather([(own if place.ip in ("::", "0.0.0.0") else place.ip, place.port) for place in places])
        if environment.rank == 0:
            (folder / "places.partial").write_text(repr(of_all))
            (folder / "places.partial").rename(folder / "places")
        with session.watchdog.phase("beside a stranger"):
            while not (folder / "done").exists():
                time.sleep(0.05)
        assert objects.gather(environment.rank) == [0, 1]
        total = torch.ones(8)
        dist.all_reduce(total)
        assert total[0] == 2
    say("done")


def stranger(_: WorkerEnvironment, network: WorkerNetwork | None, folder: Path) -> None:
    """Tries whether a store of torch answers wherever a worker listens, as far as it is reached from here."""
    enter(network)
    while not (folder / "places").exists():
        time.sleep(0.05)
    of_all: list[list[tuple[str, int]]] = eval((folder / "places").read_text())
    assert all(of_all)

    def attack(address: str, port: int) -> None:
        with suppress(RuntimeError):
            client = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
            client.set("failure", "rank 1 died")
            say(f"a store answers at {address}:{port}: {client.list_keys()}")

    # torch's client has no end where something else than a store listens.
    threads = [threading.Thread(target=attack, args=each, daemon=True) for places in of_all for each in places]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 5
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    (folder / "done").touch()
    say("done")
    os._exit(0)


@pytest.fixture(params=["this machine", "another namespace"])
def networks(request: pytest.FixtureRequest) -> Iterator[tuple[WorkerNetwork | None, ...]]:
    """Of two workers and the stranger."""
    if request.param == "this machine":
        yield (None,) * 3
        return
    if (reason := why_not(user=os.geteuid())) is not None:
        pytest.skip(reason)
    with worker_networks([1e9] * 3) as made:
        yield made


def test_a_stranger_reaches_no_store(networks: tuple[WorkerNetwork | None, ...], tmp_path: Path) -> None:
    with Crowd() as crowd:
        workers = [crowd.start(met, networks[rank], tmp_path, rank=rank, world_size=2) for rank in range(2)]
        other = crowd.start(stranger, networks[2], tmp_path, rank=0, world_size=1)
        assert other.wait() == 0
        assert "a store answers" not in other.output
        assert [worker.wait() for worker in workers] == [0, 0]
        assert [worker.output.splitlines()[-1] for worker in workers] == ["done"] * 2
