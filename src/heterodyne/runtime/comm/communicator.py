"""The workers of one job and the process groups between them.

Gradients, batch statistics and control have a `ProcessGroup` each, so that their orders are independent.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from heterodyne.cluster.spec import Link
from heterodyne.errors import WorkerError
from heterodyne.plan.islands import uplink
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.comm.islands import Islands
from heterodyne.runtime.comm.objects import Objects
from heterodyne.runtime.comm.p2p import P2P, Lane
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.comm.shared_memory import neighbourhood

__all__ = ["Communicator", "platform_of"]

T = TypeVar("T")


def platform_of(device_type: str, hip: str | None) -> str:
    """What devices must have in common to use one native backend: the type, except that a ROCm build (with a ``hip`` version) calls its
    devices "cuda" too.
    """
    return "rocm" if device_type == "cuda" and hip else device_type


@dataclass(frozen=True)
class _DeviceOfRank:
    """``backend``: by which devices of its platform talk, as torch.distributed names it. ``identity``: differs between any two devices."""

    platform: str
    backend: str
    identity: str

    @classmethod
    def of(cls, device: torch.device) -> Self:
        # A tensor knows which one of its type "cuda" stands for.
        device = torch.empty(0, device=device).device
        return cls(
            platform_of(device.type, torch.version.hip),
            dist.Backend.default_device_backend_map.get(device.type, "gloo"),
            _identity(device),
        )


def _identity(device: torch.device) -> str:
    """Its own number where the driver tells one: processes that see one device each all count it as the first."""
    ask = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_properties", None)
    number = None if ask is None else getattr(ask(device.index), "uuid", None)
    return str(number) if number else f"{socket.gethostname()} {device}"


def _default_timeout() -> timedelta | None:
    """Of the default group's collectives; None where there is none."""
    if not dist.is_initialized():
        return None
    group = dist.distributed_c10d._get_default_group()
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


class Communicator:
    """Makes the process groups between the workers of one job, and carries control messages.

    Args:
        rank, world_size: this worker's place. With more than one rank, torch.distributed has been initialised.
        device: this worker's device.
        timeout_s: a collective that takes longer fails; None: that of the default group, not of each backend.
        key: signs the objects that ranks send each other, see `Objects`.

    Making one, and `process_group`, are collective: every rank does it, in the same order.
    """

    def __init__(
        self, *, rank: int, world_size: int, device: torch.device, timeout_s: float | None = None, key: bytes = b""
    ) -> None:
        if world_size > 1 and not dist.is_initialized():
            raise WorkerError(
                f"rank {rank} of {world_size}: torch.distributed is not initialised; start it with 'heterodyne train' or torchrun"
            )
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._timeout = _default_timeout() if timeout_s is None else timedelta(seconds=timeout_s)
        self._key = key
        self.links: Sequence[Link] | None = None
        """From the host of each rank to other hosts, the same on every rank; None: not known. Read where process groups are made."""
        self._process_groups: list[ProcessGroup] = []
        self._p2ps: list[P2P] = []
        self._is_branch = False
        everyone = range(world_size)
        self._control_group = self._group(everyone, "gloo")
        self._objects = Objects(self._control_group, key)
        self.control = ProcessGroup(everyone, self._control_group, device=device, via_host=True)
        self._devices = self.all_gather_object(_DeviceOfRank.of(device))
        self._neighbourhoods = self.all_gather_object(neighbourhood())

    @property
    def agreement(self) -> Agreement:
        """Of the ranks that control messages go to."""
        return Agreement(group=self._control_group, rank=self.rank, size=self.world_size, objects=self._objects)

    def process_group(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """A process group of those ranks; None if this rank is not one of them."""
        islands = self._islands(ranks)
        backend = self._native_backend(ranks)
        group = self._group(ranks, backend or "gloo")
        up, down = self._inside(islands)
        if self.rank not in ranks:
            return None
        homes = {self._neighbourhoods[rank] for rank in ranks}
        on_hosts = {self._devices[rank].platform for rank in ranks} == {"cpu"}
        neighbours = on_hosts and len(homes) == 1 and None not in homes
        made = ProcessGroup(
            ranks,
            group,
            device=self.device,
            via_host=backend is None,
            neighbours=neighbours,
            islands=None if not islands or group is None else self._over(ranks, islands, group, up, down),
            inside=up,
            key=self._key,
        )
        self._process_groups.append(made)
        if backend not in (None, "gloo"):
            made.connect()
        return made

    def _islands(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the ranks that reach each other by something faster than others: devices of one platform, CPU workers of one host. Nothing
        if that makes no difference: there is one island, or each has one rank.
        """
        found: dict[object, list[int]] = {}
        for rank in ranks:
            platform = self._devices[rank].platform
            home = self._neighbourhoods[rank] or rank
            found.setdefault(platform if platform != "cpu" else ("cpu", home), []).append(rank)
        islands = [tuple(each) for each in found.values() if self._native_backend(each) is not None or len(each) == 1]
        useful = len(islands) == len(found) and len(islands) > 1 and any(len(each) > 1 for each in islands)
        return islands if useful else []

    def _over(
        self,
        ranks: Sequence[int],
        islands: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        up: ProcessGroup | None,
        down: ProcessGroup | None,
    ) -> Islands:
        bandwidths, latency_s = None, 0.0
        if self.links is not None:
            of_islands = [[self.links[rank] for rank in island] for island in islands]
            bandwidths = [
                uplink([link.between[0] for link in of], [link.bandwidth_bytes_per_s for link in of])
                for of in of_islands
            ]
            latency_s = max(link.latency_s for of in of_islands for link in of)
        place_of = {rank: place for place, rank in enumerate(ranks)}
        places = [[place_of[rank] for rank in island] for island in islands]
        on_host = [self._devices[island[0]].platform == "cpu" for island in islands]
        return Islands(place_of[self.rank], places, group, up, down, bandwidths, latency_s, on_host)

    def _inside(self, islands: Sequence[Sequence[int]]) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """Return the process groups of this rank's island for the way up and down, None for one of one rank. Collective over all ranks.

        They are two where calls come from several threads, as those of accelerators do.
        """
        up: ProcessGroup | None = None
        down: ProcessGroup | None = None
        for island in (each for each in islands if len(each) > 1):
            first = self.process_group(island)
            second = first if self._devices[island[0]].platform == "cpu" else self.process_group(island)
            if first is not None:
                up, down = first, second
        return up, down

    def p2p(self) -> P2P:
        """A way to send tensors from rank to rank. Collective over all ranks."""
        lanes: dict[int, Lane | None] = {}
        everyone = range(self.world_size)
        platforms = dict.fromkeys(device.platform for device in self._devices)
        equal = [[rank for rank in everyone if self._devices[rank].platform == platform] for platform in platforms]
        native = {
            tuple(ranks): backend for ranks in equal if (backend := self._native_backend(ranks)) not in (None, "gloo")
        }
        if tuple(everyone) not in native:
            through_host = self._lane(everyone, "gloo", via_host=self.device.type != "cpu")
            lanes |= dict.fromkeys(everyone, through_host)
        for ranks, backend in native.items():
            lane = self._lane(ranks, backend, via_host=False)
            if self.rank in ranks:
                lanes |= dict.fromkeys(ranks, lane)
        made = P2P(
            rank=self.rank,
            device=self.device,
            lanes={rank: lane for rank, lane in lanes.items() if lane is not None and rank != self.rank},
        )
        self._p2ps.append(made)
        return made

    def _lane(self, ranks: Sequence[int], backend: str, *, via_host: bool) -> Lane | None:
        """Between these ranks; None on others. Collective over all."""
        groups = [self._group(ranks, backend) for _ in range(2)]
        if groups[0] is None or groups[1] is None:
            return None
        return Lane(upward=groups[0], downward=groups[1], via_host=via_host, told_late=backend == "gloo")

    def _native_backend(self, ranks: Sequence[int]) -> str | None:
        """The backend that carries tensors between these ranks directly; None: they go through host memory.

        A backend of accelerators joins devices of one platform, one rank each. It is named by the ranks with such a device: others may
        not know it. gloo carries host tensors (Apple's devices have no other backend).
        """
        devices = [self._devices[rank] for rank in ranks]
        platform, backend = devices[0].platform, devices[0].backend
        if any(device.platform != platform for device in devices):
            return None
        if platform == "cpu":
            return backend
        apart = len({device.identity for device in devices}) == len(devices)
        return backend if apart and backend != "gloo" else None

    def branch(self) -> Communicator:
        """The same ranks and the same control group, with process groups of its own: closing it closes only those.

        Each gloo group has a thread that wakes a hundred times per second, so unused groups should be closed.
        """
        made = copy.copy(self)
        made._process_groups, made._p2ps, made._is_branch = [], [], True
        return made

    def all_gather_object(self, value: T) -> list[T]:
        """The picklable values of all ranks, in order of rank."""
        return self._objects.gather(value)

    def broadcast_object(self, value: T, source: int) -> T:
        """The picklable value of rank ``source``."""
        return self._objects.broadcast(value, source)

    @property
    def borrowed_bytes(self) -> int:
        """Bytes that are resident in this process, but belong to other ranks."""
        return sum(process_group.borrowed_bytes for process_group in self._process_groups)

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        if self._control_group is not None:
            dist.barrier(group=self._control_group)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a host tensor to a rank; blocks."""
        dist.send(tensor, dst=to, group=self._control_group)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive a host tensor from a rank, in place; blocks."""
        dist.recv(tensor, src=source, group=self._control_group)

    def close(self) -> None:
        """Leave all process groups, a branch those of its own. The default group of torch.distributed stays, for it was not made here."""
        for process_group in self._process_groups:
            process_group.close()
        for p2p in self._p2ps:
            p2p.close()
        self._process_groups.clear()
        self._p2ps.clear()
        if not self._is_branch:
            self.control.close()
            self._control_group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _group(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup | None:
        if len(ranks) < 2:
            return None
        group = dist.new_group(list(ranks), backend=backend, timeout=self._timeout)
        return group if isinstance(group, dist.ProcessGroup) else None
