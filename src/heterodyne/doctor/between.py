"""All hosts looked at together: each says its facts, and the links between them are measured, a pair at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import torch

from heterodyne.cluster import Cluster
from heterodyne.doctor.facts import HostFacts, interface_towards, read_facts
from heterodyne.doctor.faults import Fault, LinkFacts, faults_between, faults_of
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.rendezvous.distributed import init_distributed
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment

__all__ = ["Examined", "examine"]

_ROUND_TRIPS = 20
_BYTES = (2**16, 2**20, 2**24, 2**26)  # of messages; the next one is sent if the last took less than this
_LONG_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What was found. ``hosts``: the facts of each, once; ``interfaces``: by which each reaches the first."""

    hosts: tuple[HostFacts, ...]
    interfaces: tuple[str, ...]
    links: tuple[LinkFacts, ...]
    faults: tuple[Fault, ...]


def examine(directory: Path, port: int, cluster: Cluster | None = None) -> Examined | None:
    """Look at this host, or at all hosts if a launcher has started processes on them; None but on rank 0.

    Raises WorkerError for ranks that do not come, with who they are.
    """
    environment = WorkerEnvironment.read()
    if environment is None or environment.world_size == 1:
        own = read_facts(directory, port)
        of_file = () if cluster is None else faults_between((own,), (), cluster)
        return Examined(hosts=(own,), interfaces=("",), links=(), faults=(*faults_of(own, others=False), *of_file))
    own = read_facts(directory, 0)  # the port of the run is taken, by this run
    with init_distributed(environment, backend="gloo", required=()) as joined:
        communicator = Communicator(
            rank=environment.rank, world_size=environment.world_size, device=torch.device("cpu"), key=joined.key
        )
        master = environment.master_address
        with joined.watchdog.phase("examining hosts", limit_s=600.0):
            return _together(communicator, own, interface_towards(master, own.interfaces), cluster)


def _together(communicator: Communicator, own: HostFacts, interface: str, cluster: Cluster | None) -> Examined | None:
    communicator.barrier()  # clocks are compared as they are now, not when each has come
    own = replace(own, utc_s=time.time())
    told = communicator.all_gather_object((own, interface))
    first = {(facts.host, facts.machine): rank for rank, (facts, _) in reversed(list(enumerate(told)))}
    ranks = sorted(first.values())
    hosts = [told[rank][0] for rank in ranks]
    links = [_link(communicator, a, b, told[a][0].host, told[b][0].host) for a, b in combinations(ranks, 2)]
    apart = _apart(communicator, own.directory, ranks)
    if communicator.rank:
        return None
    faults = [fault for facts in hosts for fault in faults_of(facts, others=len(hosts) > 1)]
    faults += faults_between(hosts, [link for link in links if link is not None], cluster)
    faults += [
        Fault(
            host=told[rank][0].host,
            what=f"{own.directory} is another directory there than on {hosts[0].host}",
            remedy="runs in it keep on each host what its ranks write, and are lost with any host: mount a disk that all hosts see, and "
            "choose it with --directory, if they shall not",
        )
        for rank in apart
    ]
    return Examined(
        hosts=tuple(hosts),
        interfaces=tuple(told[rank][1] for rank in ranks),
        links=tuple(link for link in links if link is not None),
        faults=tuple(faults),
    )


def _link(communicator: Communicator, a: int, b: int, host: str, other: str) -> LinkFacts | None:
    """Send to and fro between two ranks while the others wait. Collective."""
    found = None
    if communicator.rank in (a, b):
        latency_s = _round_trip_s(communicator, a, b, 1, _ROUND_TRIPS) / 2
        for size in _BYTES:
            took_s = _round_trip_s(communicator, a, b, size, 1) / 2
            rate = size / took_s  # the largest message counts: smaller ones fit into buffers
            if took_s > _LONG_S:
                break
        found = LinkFacts(hosts=(host, other), bandwidth_bytes_per_s=rate, latency_s=latency_s)
    return communicator.broadcast_object(found, a)


def _round_trip_s(communicator: Communicator, a: int, b: int, size: int, times: int) -> float:
    """Return the seconds of a round trip of so many bytes, as rank ``a`` sees it, on both ranks."""
    message, spent = torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.float64)
    begin = time.perf_counter()
    for _ in range(times):
        for sender, receiver in ((a, b), (b, a)):
            if communicator.rank == sender:
                communicator.send(message, receiver)
            else:
                communicator.receive(message, sender)
    spent[0] = (time.perf_counter() - begin) / times
    if communicator.rank == a:
        communicator.send(spent, b)
    else:
        communicator.receive(spent, a)
    return float(spent)


def _apart(communicator: Communicator, directory: str, ranks: Sequence[int]) -> list[int]:
    """Return those of the ranks that do not see what rank 0 writes into the directory. Collective."""
    probe = Path(directory) / f".heterodyne-doctor-{communicator.broadcast_object(os.getpid(), 0)}"
    with suppress(OSError):  # it is told as not writable
        if communicator.rank == 0:
            probe.touch()
    communicator.barrier()
    seen = communicator.all_gather_object(probe.exists())
    if communicator.rank == 0:
        probe.unlink(missing_ok=True)
    return [rank for rank in ranks if seen[0] and not seen[rank]]
