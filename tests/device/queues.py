"""What a device does for a collective backend: queues of operations, works that hold streams, hosts that wait and look for deadlocks."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from device.accelerator import Accelerator
from device.deadlock import Head, HostWait, State, cycle

__all__ = ["CommunicatorQueue", "DeadlockError", "DeviceQueues", "Operation", "StreamWork"]

_LOOK_S = 0.2  # how long a host waits before it looks for a deadlock, and between looks
_PATIENCE_S = 180.0  # nothing in the tests takes this long


class DeadlockError(RuntimeError):
    """On a GPU this would hang; the message says who waits for whom."""


class Operation:
    """What a communicator does in its turn. ``run`` does it on the host's copies, ``apply`` shows the result to the device."""

    def __init__(
        self, communicator: CommunicatorQueue, kind: str, peer: int | None, run: Callable[[], Callable[[], None]]
    ) -> None:
        self.communicator = communicator
        self.kind = kind
        self.peer = peer
        self.number = communicator.count(kind, peer)
        self.deps: list[Operation] = []
        self._run: Callable[[], Callable[[], None]] | None = run
        self._apply: Callable[[], None] | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self.over = threading.Event()
        self.ended_s = 0.0

    def do(self) -> None:
        for dep in self.deps:
            dep.over.wait()
            dep.apply()
        assert self._run is not None
        try:
            self._apply = self._run()
        except RuntimeError:
            raise
        except Exception as error:  # noqa: BLE001  # a fault of this file, and no peer's
            self._error = error
        self._run, self.deps = None, []  # or tensors would stay as long as the ticket
        self.ended_s = time.monotonic()
        self.over.set()

    def apply(self) -> None:
        """Raises what `run` has raised."""
        if self._error is not None:
            raise self._error
        with self._lock:  # who comes second goes on when the result is there
            apply, self._apply = self._apply, None
            if apply is not None:
                apply()


class DeviceQueues:
    """The accelerator of this process: its tickets, and what its host waits for."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.communicators: dict[str, CommunicatorQueue] = {}
        self.operations: dict[int, Operation] = {}
        self._ended_s: dict[int, float] = {}  # of those that are gone
        self._tickets = itertools.count(1)
        self._host: HostWait | None = None
        self._published = False
        accelerator.on_ticket(self._resolve, self._is_done)

    def ticket(self, operation: Operation) -> int:
        number = next(self._tickets)
        self.operations[number] = operation
        return number

    def waited_by_stream(self, index: int) -> list[Operation]:
        tickets = self.accelerator.stream_tickets(index)
        return [self.operations[ticket] for ticket in tickets if ticket in self.operations]

    def forget(self, communicators: set[CommunicatorQueue]) -> None:
        for communicator in communicators:
            self.communicators.pop(communicator.name, None)

    def wait(self, done: Callable[[], bool], waits_for: HostWait, pause: Callable[[], object]) -> None:
        """Keep the host until it is done. Raises DeadlockError."""
        started_s = looked_s = time.monotonic()
        suspected: list[str] = []
        self._host = waits_for
        try:
            while not done():
                pause()
                now_s = time.monotonic()
                if dist.is_initialized() and now_s - looked_s > _LOOK_S:  # a rank alone waits for itself only
                    looked_s = now_s
                    suspected = self._look(suspected)
                if now_s - started_s > _PATIENCE_S:
                    raise DeadlockError(f"nothing came for {_PATIENCE_S} s: {waits_for}")
        finally:
            self._host = None
            if self._published:
                self._publish()
                self._published = False

    def _resolve(self, ticket: int) -> float:
        if ticket in self._ended_s:
            return self._ended_s[ticket]
        named = () if ticket not in self.operations else (self.operations[ticket],)  # one that is forgotten is over
        operations = list(self.operations.values()) if ticket < 0 else list(named)
        for operation in operations:
            if not operation.over.is_set():
                self.wait(
                    operation.over.is_set,
                    HostWait(queue=operation.communicator.name),
                    lambda over=operation.over: over.wait(0.05),
                )
            operation.apply()
        if ticket < 0:
            over = set(map(id, operations))
            gone = {n: operation for n, operation in self.operations.items() if id(operation) in over}
            self._ended_s |= {n: operation.ended_s for n, operation in gone.items()}
            self.operations = {n: operation for n, operation in self.operations.items() if n not in gone}
        return max((operation.ended_s for operation in operations), default=0.0)

    def _is_done(self, ticket: int) -> bool:
        operation = self.operations.get(ticket)
        return operation is None or operation.over.is_set()

    def _look(self, suspected: list[str]) -> list[str]:
        """A cycle of ranks that wait for each other; raises if it was there before."""
        self._publish()
        self._published = True
        store = _board()
        if store.check(["deadlock"]):
            raise DeadlockError(store.get("deadlock").decode())
        states = {}
        for rank in range(dist.get_world_size()):
            if store.check([str(rank)]):
                states[rank] = State.read(store.get(str(rank)).decode())
        found = cycle(states)
        if found and found == suspected:
            words = "a GPU would hang here: " + "; ".join(found)
            store.set("deadlock", words)
            raise DeadlockError(words)
        return found

    def _publish(self) -> None:
        heads = {name: communicator.head() for name, communicator in list(self.communicators.items())}
        _board().set(str(dist.get_rank()), State(host=self._host, heads=heads).written())


def _board() -> Any:
    """Where ranks say what they wait for."""
    return dist.PrefixStore("strict-board", dist.distributed_c10d._get_default_store())


class CommunicatorQueue:
    """One queue of operations between some ranks of a group, in the order of the calls."""

    def __init__(self, device: DeviceQueues, name: str, members: Sequence[int]) -> None:
        self.name = name
        self.members = list(members)  # global ranks
        self._device = device
        self._counts: defaultdict[tuple[str, int | None], int] = defaultdict(int)
        self._waiting: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._open: list[Operation] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def count(self, kind: str, peer: int | None) -> int:
        self._counts[kind, peer] += 1
        return self._counts[kind, peer]

    def post(self, operation: Operation) -> None:
        with self._lock:
            self._open.append(operation)
        self._waiting.put(operation)

    def head(self) -> Head:
        with self._lock:
            first = self._open[0] if self._open else None
        if first is None:
            return Head(members=self.members, done=sum(self._counts.values()))
        return Head(
            members=self.members,
            done=sum(self._counts.values()) - len(self._open),
            kind=first.kind,
            peer=first.peer,
            number=first.number,
            deps=[dep.communicator.name for dep in first.deps if not dep.over.is_set()],
        )

    def close(self) -> None:
        self._waiting.put(None)

    def _serve(self) -> None:
        while (operation := self._waiting.get()) is not None:
            try:
                operation.do()
            except RuntimeError:
                return  # the peer is gone: as on a GPU, what waits for it waits on
            with self._lock:
                self._open.remove(operation)


class StreamWork(dist.Work):
    """Holds streams, never the host."""

    def __init__(self, device: DeviceQueues, index: int, operation: Operation) -> None:
        super().__init__()
        self._device = device
        self._index = index
        self._operation = operation
        self._ticket = device.ticket(operation)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._device.accelerator.stream_wait(self._index, self._ticket)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._operation.over.is_set():
            return False
        self._operation.apply()
        return True

    def is_success(self) -> bool:
        return self.is_completed()
