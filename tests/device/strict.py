"""A collective backend over gloo that refuses what NCCL refuses, for the accelerator of the tests.

- Tensors of the host, and tensors that are not contiguous, are refused.
- A communicator is made when it is first used, and its making blocks the host until all of its members use it. All collectives of a group,
  and its batched point-to-point calls, share one; unbatched ones make one for each pair of ranks.
- What a communicator is given it does one after the other, in the order of the calls. Tags are ignored.
- `wait` of a work holds the current stream of the device, not the host. Before that, results are not there.
- Ranks of another vendor, and two ranks of one device, cannot share a communicator.
- A peer that dies is not noticed: who waits for it waits on.

Where NCCL would hang for ever, `queues.DeadlockError` is raised on all ranks that take part: see `deadlock`.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device.accelerator import Accelerator
from device.deadlock import HostWait
from device.queues import CommunicatorQueue, DeviceQueues, Operation, StreamWork

__all__ = ["StrictGroup", "register"]

BACKEND = "strict"


def register(accelerator: Accelerator) -> None:
    """The backend of this process's accelerator from now on. Once a process."""
    made = DeviceQueues(accelerator)
    accelerator.queues = made

    def create(options: Any, _: object) -> StrictGroup:
        return StrictGroup(made, options)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=[accelerator.name])


class StrictGroup(dist.ProcessGroup):
    """Made by `torch.distributed.new_group(ranks, backend="strict")`."""

    def __init__(self, device: DeviceQueues, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._device = device
        self._name = options.group_id
        self.timeout: timedelta = options.timeout
        # That of the options has the device's name in it, which differs between vendors.
        self._store = dist.PrefixStore(f"strict/{self._name}", dist.distributed_c10d._get_default_store())
        self._here, self._size = options.group_rank, options.group_size
        self._ranks = list(options.global_ranks_in_group) or list(range(self._size))
        self._gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", self._store), self._here, self._size, timeout=timedelta(hours=1)
        )
        self._communicators: dict[str, CommunicatorQueue] = {}
        self._batch: list[tuple[str, Tensor, int]] | None = None

    # What torch.distributed calls.

    @property
    def group_name(self) -> str:
        return self._name  # type: ignore[no-any-return]

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> StreamWork:
        (tensor,) = tensors
        return self._collective("all_reduce", [tensor], [tensor], lambda i, o: self._gloo.allreduce(o, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> StreamWork:
        (tensor,) = tensors
        return self._collective("broadcast", [tensor], [tensor], lambda i, o: self._gloo.broadcast(o, opts))

    def all_to_all_single(
        self, output: Tensor, given: Tensor, into: list[int], out_of: list[int], opts: Any = None
    ) -> StreamWork:
        return self._collective(
            "all_to_all",
            [given],
            [output],
            lambda i, o: self._gloo.alltoall_base(o[0], i[0], into, out_of, dist.AllToAllOptions()),
        )

    def allgather(self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> StreamWork:
        """Parts may differ in size, as they may for NCCL, which broadcasts each then."""

        def run(i: list[Tensor], o: list[Tensor]) -> _All:
            o[self._here].copy_(i[0])
            return _All([self._gloo.broadcast([each], _root(rank)) for rank, each in enumerate(o)])

        return self._collective("all_gather", given, outputs[0], run)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> StreamWork:
        return self._collective(
            "all_gather", [given], [output], lambda i, o: self._gloo.allgather([list(o[0].chunk(self._size))], i)
        )

    _allgather_base = all_gather_single

    def reduce_scatter(self, outputs: list[Tensor], given: list[list[Tensor]], opts: Any = None) -> StreamWork:
        """Parts may differ in size, as they may for NCCL, which reduces each to its rank then."""

        def run(i: list[Tensor], o: list[Tensor]) -> _All:
            works = [self._gloo.reduce([each], _root(rank, dist.ReduceOptions())) for rank, each in enumerate(i)]
            return _All(works, lambda: o[0].copy_(i[self._here]))

        return self._collective("reduce_scatter", given[0], outputs, run)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> StreamWork:
        return self.reduce_scatter([output], [list(given.chunk(self._size))], opts)

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> StreamWork:
        device = torch.device(self._device.accelerator.name, torch.accelerator.current_device_index())
        work = self.allreduce([torch.zeros(1, device=device)], dist.AllreduceOptions())
        work.wait()
        torch.accelerator.synchronize(device)
        return work

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> StreamWork | None:
        return self._point_to_point("send", tensors[0], to)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> StreamWork | None:
        return self._point_to_point("recv", tensors[0], source)

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> StreamWork:
        batch, self._batch = self._batch or [], None
        communicator = self._communicator("all", range(self._size))
        runs = [self._started(communicator, *call) for call in batch]

        def run() -> Callable[[], None]:
            applies = [finish() for finish in [start() for start in runs]]
            return lambda: [apply() for apply in applies] and None

        return self._posted(communicator, "batch", None, batch[0][1], run)

    def shutdown(self) -> None:
        for communicator in self._communicators.values():
            communicator.close()
        self._device.forget(set(self._communicators.values()))
        self._communicators.clear()

    def abort(self) -> None:
        self.shutdown()

    # How it is done.

    def _collective(
        self, kind: str, given: list[Tensor], outputs: list[Tensor], start: Callable[[list[Tensor], list[Tensor]], Any]
    ) -> StreamWork:
        for tensor in (*given, *outputs):
            self._require_own(tensor)
        communicator = self._communicator("all", range(self._size))
        taken = _taken(given, self._device)

        def run() -> Callable[[], None]:
            inputs = [each() for each in taken]
            results = [
                inputs[given.index(output)]
                if any(output is each for each in given)
                else torch.empty_like(_window(output))
                for output in outputs
            ]
            start(inputs, results).wait()
            return lambda: _show(results, outputs)

        return self._posted(communicator, kind, None, outputs[0], run)

    def _point_to_point(self, kind: str, tensor: Tensor, peer: int) -> StreamWork | None:
        self._require_own(tensor)
        if self._batch is not None:
            self._batch.append((kind, tensor, peer))
            return None
        low, high = sorted((self._here, peer))
        communicator = self._communicator(f"{low}:{high}", (low, high))
        start = self._started(communicator, kind, tensor, peer)
        return self._posted(communicator, kind, self._ranks[peer], tensor, lambda: start()())

    def _started(
        self, communicator: CommunicatorQueue, kind: str, tensor: Tensor, peer: int
    ) -> Callable[[], Callable[[], Callable[[], None]]]:
        """Begins the message when it is called; what it gives waits for its end, and gives what shows the result."""
        batched = communicator is self._communicators.get("all")
        # gloo matches by tag; the count is that of the messages in one direction.
        tag = 2 * communicator.count(f"tag of {kind}", peer) + batched
        (taken,) = _taken([tensor], self._device) if kind == "send" else (lambda: torch.empty_like(_window(tensor)),)

        def start() -> Callable[[], Callable[[], None]]:
            host = taken()
            work = self._gloo.send([host], peer, tag) if kind == "send" else self._gloo.recv([host], peer, tag)

            def finish() -> Callable[[], None]:
                work.wait()
                return lambda: _show([host], [tensor] if kind == "recv" else [])

            return finish

        return start

    def _posted(
        self,
        communicator: CommunicatorQueue,
        kind: str,
        peer: int | None,
        tensor: Tensor,
        run: Callable[[], Callable[[], None]],
    ) -> StreamWork:
        operation = Operation(communicator, kind, peer, run)
        operation.deps = self._device.waited_by_stream(tensor.device.index)
        communicator.post(operation)
        return StreamWork(self._device, tensor.device.index, operation)

    def _communicator(self, key: str, members: Sequence[int]) -> CommunicatorQueue:
        """Made at its first use: the host goes on when all members have come."""
        if key not in self._communicators:
            own = torch.get_device_module().get_device_properties(torch.accelerator.current_device_index())
            mine = json.dumps({"vendor": self._device.accelerator.name, "device": own.uuid})
            self._store.set(f"{key}/{self._here}", mine)
            others = {member: f"{key}/{member}" for member in members if member != self._here}
            name = f"{self._name}/{key}"

            def come() -> bool:
                for member in list(others):
                    if self._store.check([others[member]]):
                        _require_alike(mine, self._store.get(others.pop(member)).decode())
                        wait.missing.remove(self._ranks[member])
                return not others

            wait = HostWait(communicator=name, missing=[self._ranks[member] for member in others])
            self._device.wait(come, wait, lambda: time.sleep(0.002))
            made = CommunicatorQueue(self._device, name, [self._ranks[member] for member in members])
            self._communicators[key] = self._device.communicators[name] = made
        return self._communicators[key]

    def _require_own(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device.accelerator.name:
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")


class _All:
    """Works that are waited for together; then ``ended`` is called."""

    def __init__(self, works: list[Any], ended: Callable[[], object] = lambda: None) -> None:
        self._works, self._ended = works, ended

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._ended()


def _root(rank: int, options: Any = None) -> Any:
    options = dist.BroadcastOptions() if options is None else options
    options.rootRank = rank
    return options


def _require_alike(mine: str, other: str) -> None:
    here, there = json.loads(mine), json.loads(other)
    if here["vendor"] != there["vendor"]:
        raise RuntimeError(f"devices of {here['vendor']} and of {there['vendor']} cannot share a communicator")
    if here["device"] == there["device"]:
        raise RuntimeError(f"two ranks have the same device {here['device']}")


def _window(tensor: Tensor) -> Tensor:
    """The memory of a contiguous device tensor, seen by the host, which is not held and not counted."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    room = (ctypes.c_uint8 * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(room, dtype=tensor.dtype).view(tensor.shape)


def _taken(tensors: Sequence[Tensor], device: DeviceQueues) -> list[Callable[[], Tensor]]:
    """Copies of what the tensors hold when the stream has come here: now, or when what it waits for is over."""
    if tensors and device.waited_by_stream(tensors[0].device.index):
        return [lambda tensor=tensor: _window(tensor).clone() for tensor in tensors]  # type: ignore[misc]
    copies = [_window(tensor).clone() for tensor in tensors]
    return [lambda copy=copy: copy for copy in copies]  # type: ignore[misc]


def _show(results: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    for result, output in zip(results, outputs, strict=False):
        _window(output).copy_(result)
