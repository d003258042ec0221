"""Who waits for whom, from what each rank says of itself, and whether they wait in a circle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

__all__ = ["Head", "HostWait", "State", "cycle"]


@dataclass(kw_only=True)
class HostWait:
    """Why a host does not go on: ranks that have not come to a communicator yet, or a queue of its own device."""

    communicator: str = ""
    missing: list[int] = field(default_factory=list)
    queue: str = ""

    def __str__(self) -> str:
        if self.queue:
            return f"a kernel needs the result of {self.queue}"
        return f"the first call of {self.communicator} blocks the host until ranks {self.missing} call it"


@dataclass(kw_only=True)
class Head:
    """The first operation of a communicator that is not over; ``kind`` "": there is none. ``done``: how many are over."""

    members: list[int]
    done: int
    kind: str = ""
    peer: int | None = None
    number: int = 0
    deps: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class State:
    """One rank: what its host waits for, None while it runs, and the heads of its communicators by name."""

    host: HostWait | None
    heads: dict[str, Head]

    def written(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> State:
        value = json.loads(text)
        host = None if value["host"] is None else HostWait(**value["host"])
        return cls(host=host, heads={name: Head(**head) for name, head in value["heads"].items()})


_Node = tuple[int, str]  # a rank's host (""), or its queue of a communicator
_PARTNER = {"send": "recv", "recv": "send"}


def cycle(states: Mapping[int, State]) -> list[str]:
    """A circle of waits in words; empty if there is none. A rank of which nothing is known runs."""
    for rank in states:
        found = _from((rank, ""), states, [])
        if found:
            first = found.index(min(found))
            return [_words(node, states) for node in found[first:] + found[:first]]
    return []


def _from(node: _Node, states: Mapping[int, State], path: list[_Node]) -> list[_Node]:
    if node in path:
        return path[path.index(node) :]
    for other in _waits_for(node, states):
        found = _from(other, states, [*path, node])
        if found:
            return found
    return []


def _waits_for(node: _Node, states: Mapping[int, State]) -> Iterator[_Node]:
    rank, name = node
    state = states.get(rank)
    if state is None:
        return
    if not name:
        if state.host is not None:
            yield from [(rank, state.host.queue)] if state.host.queue else [(other, "") for other in state.host.missing]
        return
    head = state.heads.get(name)
    if head is None or not head.kind:
        return
    yield from ((rank, dep) for dep in head.deps)
    for other in [head.peer] if head.peer is not None else head.members:
        if other != rank and other in states:
            theirs = states[other].heads.get(name)
            if theirs is None or not theirs.kind:
                if theirs is None or head.peer is not None or theirs.done <= head.done:
                    yield other, ""
            elif not _meet(head, theirs, rank):
                yield other, name


def _meet(head: Head, theirs: Head, rank: int) -> bool:
    """Whether the two are one operation (or the other is ahead), so that neither waits for the other's queue."""
    if head.peer is None:
        return theirs.done >= head.done
    return theirs.kind == _PARTNER[head.kind] and theirs.peer == rank and theirs.number == head.number


def _words(node: _Node, states: Mapping[int, State]) -> str:
    rank, name = node
    if not name:
        return f"rank {rank}: {states[rank].host}"
    head = states[rank].heads[name]
    with_whom = "" if head.peer is None else f" {'to' if head.kind == 'send' else 'from'} rank {head.peer}"
    return f"rank {rank}: {head.kind} number {head.number}{with_whom} is the first in its queue of {name}"
