"""`heterodyne doctor` on emulated hosts, each with a name, a network and files of its own, names what is wrong with them: host, cause and
remedy.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from heterodyne.cluster.file import load_cluster
from heterodyne.doctor import between, examine
from heterodyne.doctor.between import Examined
from heterodyne.emulate.network import WorkerNetwork, why_not, worker_networks
from heterodyne.errors import WorkerError
from heterodyne.runtime.rendezvous.environment import SECRET_VARIABLE, WorkerEnvironment
from multiprocess.crowd import Crowd
from multiprocess.misfortunes import say
from multiprocess.namespaces import enter
from multiprocess.test_hosts import lose

NEWNS, NEWUTS = 0x20000, 0x4000000
CLUSTER = """
name: said
nodes:
  - name: a
    devices: [{kind: cpu, count: 1, memory: 1GiB}]
  - name: b
    devices: [{kind: H100-SXM-80GB, count: 2}]
  - name: absent
    devices: [{kind: cpu, count: 1, memory: 1GiB}]
links:
  - {between: [a, b], bandwidth: 500 MB/s, latency: 10 us}
"""


class Case(NamedTuple):
    """Hosts by name, with the functions that spoil them; ``links``: bytes per second of each."""

    hosts: tuple[tuple[str, tuple[str, ...]], ...]
    links: tuple[float, ...]


CASES = {
    "one host": Case(
        (("a", ()), ("b", ("loopback", "nccl", "files", "shm", "read_only", "torch", "clock"))), (1e9, 1e9)
    ),
    "between hosts": Case((("a", ("secret",)), ("b", ("secret", "unresolved", "own_disk"))), (1e7, 1e7)),
    "one name": Case((("a", ()), ("a", ())), (1e9, 1e9)),
    "interface": Case((("a", ()), ("b", ("gloo",))), (1e9, 1e9)),
    "islands": Case((("a", ()), ("b", ()), ("c", ())), (1e9, 1e9, 1e9)),
}
FAULTS = {
    "its name resolves to loopback": ("one host", "b", "its name b resolves to 127.0.1.1 there", "into /etc/hosts"),
    "NCCL's interface": (
        "one host",
        "b",
        "NCCL_SOCKET_IFNAME=ib, and no interface begins so",
        "beginnings of names: eth0",
    ),
    "few files": ("one host", "b", "a process may open 3000 files", "ulimit -n"),
    "little shared memory": ("one host", "b", "/dev/shm has 64 MiB", "--shm-size=8g"),
    "a read-only directory": ("one host", "b", "runs cannot be written to", "--directory"),
    "another torch": ("one host", "b", "it has torch 2.12.1, and a has", "install one version of torch"),
    "another time": ("one host", "b", "its clock differs by .* from that of a", "timedatectl"),
    "too few devices": ("one host", "b", "it has 0 accelerators, and the cluster file says 2", "CUDA_VISIBLE_DEVICES"),
    "a host that does not run": ("one host", "absent", "nothing runs there", "start a process on it"),
    "a slow link": (
        "between hosts",
        "a - b",
        r"the link carries \S+ MB/s, and the cluster file says 500 MB/s",
        "ethtool",
    ),
    "no secret": ("between hosts", "b", "HETERODYNE_RUN_SECRET is not set", "openssl rand -hex 32"),
    "its name is unknown": ("between hosts", "b", "its name b does not resolve", "to /etc/hosts, on every host"),
    "a disk of its own": (
        "between hosts",
        "b",
        "runs is another directory there than on a",
        "mount a disk that all hosts see",
    ),
    "two hosts of one name": ("one name", "a", "two machines have this name", "hostnamectl set-hostname"),
    "gloo's interface": (
        "interface",
        "b",
        "GLOO_SOCKET_IFNAME=ib0, and there is no interface ib0",
        "names of interfaces: eth0",
    ),
    "two islands": (
        "islands",
        "b",
        r"rank 1 on b \(.*\) does not reach rank 2 on c",
        "open all ports between these hosts",
    ),
}


def over(own: Path, there: str, *options: str) -> None:
    subprocess.run(["mount", *options, str(own), there], check=True)


def spoil(name: str, folder: Path) -> None:
    """Do to this process, in namespaces of its own, what is wrong with its host."""
    host = socket.gethostname()
    match name:
        case "loopback" | "unresolved":
            hosts = folder / f"hosts-{os.getpid()}"
            hosts.write_text("127.0.0.1 localhost\n" + (f"127.0.1.1 {host}\n" if name == "loopback" else ""))
            over(hosts, "/etc/hosts", "--bind")
        case "nccl" | "gloo":
            os.environ[f"{name.upper()}_SOCKET_IFNAME"] = {"nccl": "ib", "gloo": "ib0"}[name]
        case "files":
            resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 3000))
        case "shm":
            over(Path("tmpfs"), "/dev/shm", "-t", "tmpfs", "-o", "size=64m")
        case "read_only":
            over(folder / "runs", str(folder / "runs"), "--bind")
            subprocess.run(["mount", "-o", "remount,bind,ro", folder / "runs"], check=True)
        case "own_disk":
            over(Path("tmpfs"), str(folder / "runs"), "-t", "tmpfs")
        case "torch":
            from heterodyne.doctor import facts

            of_host = facts.software()
            facts.software = lambda: {**of_host, "torch": "2.12.1"}
        case "clock":
            between.time = type("Ahead", (), {"time": lambda: time.time() + 3600, "perf_counter": time.perf_counter})  # type: ignore[assignment]
        case "secret":
            del os.environ[SECRET_VARIABLE]
        case other:
            raise AssertionError(other)


def look(environment: WorkerEnvironment, network: WorkerNetwork, master: str, case: str, folder: Path) -> None:
    host, faults = CASES[case].hosts[environment.rank]
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(NEWNS | NEWUTS) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    enter(network)
    socket.sethostname(host)
    os.environ |= {
        "RANK": str(environment.rank),
        "WORLD_SIZE": str(environment.world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(environment.rank),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(environment.master_port),
        SECRET_VARIABLE: environment.secret,
        "XDG_STATE_HOME": str(folder / "state"),
    }
    hosts = folder / f"hosts-of-{case}-{environment.rank}"
    hosts.write_text(f"127.0.0.1 localhost\n{network.address} {host}\n")
    over(hosts, "/etc/hosts", "--bind")
    for name in faults:
        spoil(name, folder)
    try:
        found: Examined | None = examine(folder / "runs", 0, load_cluster(folder / "cluster.yaml"))
    except WorkerError as error:
        # The verb prints it.
        say(json.dumps([(error.host, str(error), str(error))]))
        raise
    if found is not None:
        faults_found = [(fault.host, fault.what, fault.remedy) for fault in found.faults]
        say(json.dumps(faults_found))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    """What is found in each case, one after the other, so that links are measured alone."""
    if (reason := why_not(user=os.geteuid())) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "runs").mkdir()
    (folder / "cluster.yaml").write_text(CLUSTER)
    found = {}
    with ExitStack() as stack:
        for name, case in CASES.items():
            with worker_networks(case.links) as networks:
                if name == "islands":
                    lose(networks, 1, 2)
                crowd = stack.enter_context(Crowd())
                workers = [
                    crowd.start(look, network, networks[0].address, name, folder, rank=rank, world_size=len(networks))
                    for rank, network in enumerate(networks)
                ]
                for worker in workers:
                    worker.wait()
                said = "\n".join(worker.output for worker in workers)
                line = re.search(r"^\[\[.*\]\]$", said, re.MULTILINE)
                assert line is not None, said
                found[name] = json.loads(line[0])
        yield found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_was_made_is_named(told: Mapping[str, Any], name: str) -> None:
    case, host, what, remedy = FAULTS[name]
    assert [found for found in told[case] if found[0] == host and re.search(what, found[1]) and remedy in found[2]], (
        told[case]
    )


def test_nothing_else_is_named(told: Mapping[str, Any]) -> None:
    """But for what this machine has: other programs that keep it busy, and hosts of the file that a case leaves out."""
    known = [
        f"{what}|nothing runs there|no node of this name|busy|the cluster file says"
        for _, _, what, _ in FAULTS.values()
    ]
    assert [
        fault for case in told.values() for fault in case if not any(re.search(each, fault[1]) for each in known)
    ] == []
