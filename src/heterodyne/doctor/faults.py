"""What is wrong, in words, with what to do about it. Pure functions of facts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from heterodyne.cluster import Cluster
from heterodyne.doctor.facts import HostFacts
from heterodyne.runtime.rendezvous.interfaces import GLOO, NCCL, absent_interfaces
from heterodyne.runtime.rendezvous.software import unlike
from heterodyne.secret_names import SECRET_VARIABLE
from heterodyne.units import counted, format_bandwidth, format_bytes, format_seconds

__all__ = ["Fault", "LinkFacts", "faults_between", "faults_of", "slow_links"]

_SHARED_MEMORY = 2**30  # DataLoader workers and CPU ranks exchange tensors there; Docker gives 64 MiB
_FILES = 4096
_BUSY = 0.5  # of the cores
_TAKEN = 0.1  # of a device's memory
_CLOCKS_S = 2.0
_SLOW = 0.5  # of the bandwidth in the cluster file


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong on a host, or between two, and what to type or change."""

    host: str
    what: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class LinkFacts:
    """A link between two hosts, as measured from process to process."""

    hosts: tuple[str, str]
    bandwidth_bytes_per_s: float
    latency_s: float


def faults_of(facts: HostFacts, *, others: bool) -> list[Fault]:
    """Return what is wrong with one host. ``others``: whether hosts beside it take part."""
    return [
        Fault(host=facts.host, what=what, remedy=remedy)
        for what, remedy in [*_of_devices(facts), *_of_system(facts), *(_of_network(facts) if others else ())]
    ]


def _of_devices(facts: HostFacts) -> Iterator[tuple[str, str]]:
    if facts.drivers and not facts.devices:
        yield (
            f"there is a driver of {' and '.join(facts.drivers)}, but torch {facts.versions.get('torch', '')} sees no accelerator",
            "install the build of torch for it (pytorch.org, 'Get started'), and look at CUDA_VISIBLE_DEVICES",
        )
    for device in facts.devices:
        taken = device.total_bytes - device.free_bytes
        if taken > _TAKEN * device.total_bytes:
            yield (
                f"{format_bytes(taken)} of the {format_bytes(device.total_bytes)} of {device.id} are taken by other programs",
                "end them (nvidia-smi or rocm-smi names them), or give the device less memory in the cluster file",
            )


def _of_system(facts: HostFacts) -> Iterator[tuple[str, str]]:
    if facts.load > _BUSY * facts.cores:
        yield (
            f"other programs keep {facts.load:.1f} of {facts.cores} cores busy, so what is measured now holds only while they run",
            "end them ('top' names them), or wait",
        )
    if facts.shared_memory_bytes is not None and facts.shared_memory_bytes < _SHARED_MEMORY:
        yield (
            f"/dev/shm has {format_bytes(facts.shared_memory_bytes)}",
            "start the container with --shm-size=8g (Kubernetes: an emptyDir with medium: Memory)",
        )
    if facts.files < _FILES:
        yield f"a process may open {facts.files} files", f"ulimit -n {16 * _FILES}"
    if not facts.writable:
        yield (
            f"{facts.directory} cannot be written to",
            "choose another directory with --directory, or change its owner",
        )
    if not facts.port_is_free:
        yield (
            f"port {facts.port} is taken",
            f"end who has it ('ss -ltnp sport = :{facts.port}' names it), or choose another with --port (MASTER_PORT)",
        )


def _of_network(facts: HostFacts) -> Iterator[tuple[str, str]]:
    if not facts.addresses:
        yield f"its name {facts.host} does not resolve", "add it with its address to /etc/hosts, on every host"
    elif all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in facts.addresses):
        yield (
            f"its name {facts.host} resolves to {', '.join(facts.addresses)} there, so it tells others to look for it on themselves",
            f"write its address in the network for {facts.host} into /etc/hosts, and take the name out of the line of 127.0.0.1",
        )
    yield from absent_interfaces(facts.variables, facts.interfaces)
    if not facts.has_secret:
        yield (
            f"{SECRET_VARIABLE} is not set, which only hosts with one home directory can do without",
            f"export {SECRET_VARIABLE}=$(openssl rand -hex 32), the same value on every host",
        )


def faults_between(hosts: Sequence[HostFacts], links: Sequence[LinkFacts], cluster: Cluster | None) -> list[Fault]:
    """Return what is wrong between hosts, of each of which there are the facts once. ``cluster``: what is said of them."""
    return [
        *_unlike(hosts),
        *slow_links(links, cluster),
        *(_not_as_said(hosts, cluster) if cluster is not None else ()),
    ]


def _unlike(hosts: Sequence[HostFacts]) -> Iterator[Fault]:
    first = hosts[0]
    for at, facts in enumerate(hosts):
        for name, version, of_first in unlike(facts.versions, first.versions):
            yield Fault(
                host=facts.host,
                what=f"it has {name} {version}, and {first.host} has {of_first}",
                remedy=f"install one version of {name} on all hosts",
            )
        if abs(facts.utc_s - first.utc_s) > _CLOCKS_S:
            yield Fault(
                host=facts.host,
                what=f"its clock differs by {format_seconds(abs(facts.utc_s - first.utc_s))} from that of {first.host}",
                remedy="start a time service on both (timedatectl set-ntp true)",
            )
        for other in hosts[:at]:
            if other.host == facts.host and other.machine != facts.machine:
                yield Fault(
                    host=facts.host,
                    what="two machines have this name",
                    remedy="give each a name of its own (hostnamectl set-hostname)",
                )


def slow_links(links: Sequence[LinkFacts], cluster: Cluster | None) -> Iterator[Fault]:
    """Yield the links that carry much less than the cluster file says."""
    said = {} if cluster is None else {frozenset(each.between): each for each in cluster.links}
    for link in links:
        expected = said.get(frozenset(link.hosts))
        if expected is not None and link.bandwidth_bytes_per_s < _SLOW * expected.bandwidth_bytes_per_s:
            yield Fault(
                host=" - ".join(link.hosts),
                what=f"the link carries {format_bandwidth(link.bandwidth_bytes_per_s)}, and the cluster file says "
                f"{format_bandwidth(expected.bandwidth_bytes_per_s)}",
                remedy=f"look at cable, switch and interface (ethtool), choose the interface with {GLOO} and "
                f"{NCCL}, or correct the file",
            )


def _not_as_said(hosts: Sequence[HostFacts], cluster: Cluster) -> Iterator[Fault]:
    said = {
        node: [d for d in cluster.devices if d.node == node] for node in dict.fromkeys(d.node for d in cluster.devices)
    }
    for facts in hosts:
        if facts.host not in said:
            yield Fault(
                host=facts.host,
                what=f"the cluster file has no node of this name; it has {', '.join(said)}",
                remedy="give the node the name that 'hostname' prints there",
            )
            continue
        expected = sum(device.kind != "cpu" for device in said[facts.host])
        if expected != len(facts.devices):
            yield Fault(
                host=facts.host,
                what=f"it has {counted(len(facts.devices), 'accelerator')}, and the cluster file says {expected}",
                remedy="correct the file, or look at CUDA_VISIBLE_DEVICES and the driver",
            )
    for node in said.keys() - {facts.host for facts in hosts}:
        yield Fault(host=node, what="it is in the cluster file, and nothing runs there", remedy="start a process on it")
