"""Links of limited bandwidth: each worker, or each host of several, in a network namespace, all at one switch, each link with a rate.

Everything lives in namespaces of ours, the switch too: no address, interface or rule of the machine is touched, and
deleting the namespaces removes it all. The workers reach each other and nobody else.
"""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from heterodyne.emulate.names import is_leftover, name_of
from heterodyne.errors import EmulateError

__all__ = ["WorkerNetwork", "remove_leftover_namespaces", "why_not", "worker_networks"]

_NAMESPACES = Path("/run/netns")
_SUBNET = ipaddress.IPv4Network("10.254.0.0/16")
_INTERFACE = "eth0"
_QUEUE_MS = 50
_LEAST_BURST = 64 * 1024  # one segment as TCP hands it over
_TICK_S = 0.004  # the bucket must hold what flows between two ticks of the slowest usual kernel clock


@dataclass(frozen=True, kw_only=True)
class WorkerNetwork:
    """One worker's namespace, and the variables by which programs find each other inside."""

    namespace: str
    address: str
    environment: dict[str, str]

    def enter(self, command: Sequence[str]) -> tuple[str, ...]:
        """The command that enters the namespace and becomes `command`, under the same process number."""
        return ("ip", "netns", "exec", self.namespace, *command)


def why_not(*, user: int) -> str | None:
    """Return why links cannot be limited by this user here; None if they can."""
    if user != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found: install iproute2" if missing else None


@contextmanager
def worker_networks(links: Sequence[float]) -> Iterator[tuple[WorkerNetwork, ...]]:
    """A namespace for each worker, whose link to the switch carries `links` bytes per second in each direction.

    Raises:
        EmulateError: the kernel or the tools do not do it.
    """
    switch = name_of("switch")
    addresses = [str(address) for address, _ in zip(_SUBNET.hosts(), links, strict=False)]
    made: list[str] = []
    try:
        for name in (switch, *(name_of(rank) for rank in range(len(links)))):
            _run("ip", "netns", "add", name)
            made.append(name)
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        for rank, (link, address) in enumerate(zip(links, addresses, strict=True)):
            _connect(switch, rank, link, address)
        yield tuple(
            WorkerNetwork(
                namespace=name_of(rank),
                address=address,
                environment={
                    "MASTER_ADDR": addresses[0],
                    "GLOO_SOCKET_IFNAME": _INTERFACE,
                    "NCCL_SOCKET_IFNAME": _INTERFACE,
                    "TP_SOCKET_IFNAME": _INTERFACE,
                },
            )
            for rank, address in enumerate(addresses)
        )
    finally:
        for name in made:
            _run("ip", "netns", "delete", name)


def remove_leftover_namespaces() -> list[str]:
    """Remove the namespaces of emulations whose maker is dead. Returns their names."""
    if not _NAMESPACES.is_dir():
        return []
    names = sorted(entry.name for entry in _NAMESPACES.iterdir() if is_leftover(entry.name))
    for name in names:
        _run("ip", "netns", "delete", name)
    return names


def _connect(switch: str, rank: int, link: float, address: str) -> None:
    worker, port = name_of(rank), f"port{rank}"
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", _INTERFACE, "netns", worker)
    _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
    _run("ip", "-n", worker, "address", "add", f"{address}/{_SUBNET.prefixlen}", "dev", _INTERFACE)
    _run("ip", "-n", worker, "link", "set", _INTERFACE, "up")
    _run("ip", "-n", worker, "link", "set", "lo", "up")
    # Each end limits what it sends: the worker's own sending, and at the switch what the worker receives.
    for namespace, interface in ((worker, _INTERFACE), (switch, port)):
        burst = max(_LEAST_BURST, round(link * _TICK_S))
        bucket = ("tbf", "rate", f"{round(8 * link)}bit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms")
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *bucket)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulateError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
