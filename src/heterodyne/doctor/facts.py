"""What one host says of itself. Nothing here judges."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from heterodyne.measure.discover import local_accelerators
from heterodyne.processes.port import is_free
from heterodyne.runtime.rendezvous.interfaces import GLOO, NCCL
from heterodyne.runtime.rendezvous.software import software
from heterodyne.secret_names import SECRET_VARIABLE

__all__ = ["DeviceFacts", "HostFacts", "interface_towards", "read_facts"]

_DRIVERS = {"NVIDIA": Path("/proc/driver/nvidia/version"), "AMD": Path("/dev/kfd")}
_NETWORK = Path("/proc/self/ns/net")
_MACHINE_IDS = (Path("/proc/sys/kernel/random/boot_id"), Path("/etc/machine-id"))


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """One accelerator: what of its memory is free, and of how much."""

    id: str
    kind: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What one process sees of its host.

    Args:
        machine: differs between machines, whatever they are called.
        addresses: what the name of the host resolves to there; empty: nothing.
        interfaces: their addresses, by name.
        has_secret: whether the secret of the run is set.
        drivers: makers whose drivers are loaded.
        port_is_free: whether the port of the run can be opened here.
        directory: where runs are to be written; ``writable``: whether they can be.
        utc_s: the time of its clock.
    """

    host: str
    machine: str
    addresses: tuple[str, ...]
    interfaces: Mapping[str, tuple[str, ...]]
    variables: Mapping[str, str] = field(default_factory=dict)
    has_secret: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1
    load: float = 0.0
    memory_bytes: int = 0
    shared_memory_bytes: int | None = None
    files: int = 2**20
    drivers: tuple[str, ...] = ()
    devices: tuple[DeviceFacts, ...] = ()
    port: int = 29500
    port_is_free: bool = True
    directory: str = "."
    writable: bool = True
    utc_s: float = 0.0


def read_facts(directory: Path, port: int) -> HostFacts:
    """Return what this process sees of its host. It writes a file into ``directory`` and takes it away again."""
    host = socket.gethostname()
    return HostFacts(
        host=host,
        machine=_machine(),
        addresses=_addresses(host),
        interfaces={
            name: tuple(each.address for each in of if each.family in (socket.AF_INET, socket.AF_INET6))
            for name, of in psutil.net_if_addrs().items()
        },
        variables={name: os.environ[name] for name in (GLOO, NCCL) if name in os.environ},
        has_secret=SECRET_VARIABLE in os.environ,
        versions=software(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=os.getloadavg()[0],
        memory_bytes=psutil.virtual_memory().available,
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        drivers=tuple(maker for maker, path in _DRIVERS.items() if path.exists()),
        devices=tuple(_device(index, d.id, d.kind, d.memory_bytes) for index, d in enumerate(local_accelerators(host))),
        port=port,
        port_is_free=is_free(port),
        directory=str(directory.resolve()),
        writable=_is_writable(directory),
        utc_s=time.time(),
    )


def interface_towards(address: str, interfaces: Mapping[str, tuple[str, ...]]) -> str:
    """Return the interface that packets to an address leave by, or "" where nobody knows. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            own = probe.getsockname()[0]
        except OSError:
            return ""
    return next((name for name, of in interfaces.items() if own in of), "")


def _machine() -> str:
    """Containers of one machine that have networks of their own are hosts of their own."""
    network = _NETWORK.readlink() if _NETWORK.is_symlink() else ""
    known = next((path.read_text(encoding="utf-8").strip() for path in _MACHINE_IDS if path.is_file()), "")
    return f"{known or uuid.getnode()} {network}"


def _addresses(host: str) -> tuple[str, ...]:
    try:
        return tuple(sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None)}))
    except OSError:
        return ()


def _device(index: int, name: str, kind: str, total: int) -> DeviceFacts:
    free = total
    with suppress(RuntimeError, AttributeError, NotImplementedError):  # of a driver that does not say
        free, total = torch.accelerator.get_memory_info(index)
    return DeviceFacts(id=name, kind=kind, free_bytes=free, total_bytes=total)


def _is_writable(directory: Path) -> bool:
    probe = directory / f".heterodyne-doctor-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError:
        return False
    return True
