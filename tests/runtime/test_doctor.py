"""Each fault of a host or of a network is named with the host, the cause and the remedy."""

from __future__ import annotations

import dataclasses
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from heterodyne.cli.app import run
from heterodyne.cluster import Cluster, Device, Link
from heterodyne.doctor.facts import DeviceFacts, HostFacts, interface_towards, read_facts
from heterodyne.doctor.faults import LinkFacts, faults_between, faults_of

SOUND = HostFacts(
    host="a",
    machine="1",
    addresses=("10.0.0.1", "127.0.0.1"),
    interfaces={"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",)},
    has_secret=True,
    variables={"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth"},
    versions={"torch": "2.13.0", "Python": "3.11.7"},
    cores=8,
    shared_memory_bytes=2**33,
    devices=(DeviceFacts(id="a/H100:0", kind="H100-SXM-80GB", free_bytes=79 * 10**9, total_bytes=80 * 10**9),),
    drivers=("NVIDIA",),
    utc_s=1000.0,
)
TAKEN = (DeviceFacts(id="a/H100:0", kind="H100-SXM-80GB", free_bytes=40 * 10**9, total_bytes=80 * 10**9),)
OF_ONE: dict[str, tuple[dict[str, Any], str, str]] = {
    "name is loopback": ({"addresses": ("127.0.1.1",)}, "resolves to 127.0.1.1", "/etc/hosts"),
    "name is unknown": ({"addresses": ()}, "does not resolve", "/etc/hosts"),
    "interface of gloo": (
        {"variables": {**SOUND.variables, "GLOO_SOCKET_IFNAME": "^lo"}},
        r"no interface \^lo",
        "eth0",
    ),
    "interface of NCCL": (
        {"variables": {**SOUND.variables, "NCCL_SOCKET_IFNAME": "ib"}},
        "no interface begins so",
        "eth0",
    ),
    "no secret": ({"has_secret": False}, "HETERODYNE_RUN_SECRET is not set", "openssl rand"),
    "torch without driver": ({"devices": ()}, "driver of NVIDIA.*sees no accelerator", "pytorch.org"),
    "memory is taken": ({"devices": TAKEN}, "a/H100:0 are taken", "nvidia-smi"),
    "busy": ({"load": 6.5}, "6.5 of 8 cores busy", "'top'"),
    "shared memory": ({"shared_memory_bytes": 2**26}, "/dev/shm has 64 MiB", "--shm-size"),
    "files": ({"files": 256}, "may open 256 files", "ulimit -n"),
    "directory": ({"writable": False, "directory": "/runs"}, "/runs cannot be written to", "--directory"),
    "port": ({"port": 29500, "port_is_free": False}, "port 29500 is taken", "ss -ltnp"),
}


@pytest.mark.tour("doctor/")
def test_a_sound_host_has_no_fault() -> None:
    assert faults_of(SOUND, others=True) == []
    assert faults_between([SOUND], [], None) == []


@pytest.mark.parametrize("name", OF_ONE)
def test_a_fault_of_a_host_is_named(name: str) -> None:
    change, what, remedy = OF_ONE[name]
    (fault,) = faults_of(dataclasses.replace(SOUND, **change), others=True)
    assert fault.host == "a"
    assert re.search(what, fault.what)
    assert remedy in fault.remedy


def test_what_concerns_several_hosts_is_not_asked_of_one() -> None:
    alone = dataclasses.replace(SOUND, addresses=(), has_secret=False)
    assert faults_of(alone, others=False) == []


def cluster(*counts: int, bandwidth: float = 1e9) -> Cluster:
    names = "abc"[: len(counts)]
    return Cluster(
        name="said",
        devices=tuple(
            Device(id=f"{node}/{place}", kind="H100-SXM-80GB", node=node, memory_bytes=2**36, backend="cuda")
            for node, count in zip(names, counts, strict=True)
            for place in range(count)
        ),
        links=(Link(between=("a", "b"), bandwidth_bytes_per_s=bandwidth, latency_s=1e-5),) if len(counts) > 1 else (),
    )


OTHER = dataclasses.replace(SOUND, host="b", machine="2")
BETWEEN: dict[str, tuple[dict[str, Any], float, Cluster | None, str]] = {
    "version": ({"versions": {**SOUND.versions, "torch": "2.12.0"}}, 1e9, None, "torch 2.12.0, and a has 2.13.0"),
    "clock": ({"utc_s": 1090.0}, 1e9, None, "clock differs by 90"),
    "one name": ({"host": "a"}, 1e9, None, "two machines have this name"),
    "slow link": ({}, 2e7, cluster(1, 1), "carries .*the cluster file says"),
    "devices": ({}, 1e9, cluster(1, 4), "1 accelerator, and the cluster file says 4"),
    "unknown": ({"host": "x"}, 1e9, cluster(1), "no node of this name"),
    "absent": ({}, 1e9, cluster(1, 1, 2), "nothing runs there"),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_a_fault_between_hosts_is_named(name: str) -> None:
    change, bandwidth, said, what = BETWEEN[name]
    link = LinkFacts(hosts=("a", "b"), bandwidth_bytes_per_s=bandwidth, latency_s=1e-5)
    (fault,) = faults_between([SOUND, dataclasses.replace(OTHER, **change)], [link], said)
    assert re.search(what, fault.what)
    assert fault.remedy


def test_facts_are_those_of_this_host(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        facts = read_facts(tmp_path / "file" / "runs", taken.getsockname()[1])
        assert not facts.port_is_free
    assert facts.host == socket.gethostname()
    assert facts.writable
    assert list((tmp_path / "file" / "runs").iterdir()) == []
    assert "127.0.0.1" in facts.interfaces["lo"]
    assert interface_towards("127.0.0.1", facts.interfaces) == "lo"
    (tmp_path / "plain").write_text("")
    assert not read_facts(tmp_path / "plain" / "runs", 0).writable


def test_the_verb_ends_with_status_1_for_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plain").write_text("")
    assert run(["doctor", "--directory", str(tmp_path / "plain" / "runs")]) == 1
    assert "cannot be written to" in " ".join(capsys.readouterr().out.split())
