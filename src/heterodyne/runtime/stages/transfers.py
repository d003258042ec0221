"""Point-to-point messages of a pipeline: activations forward, their gradients back, each rank its own samples.

A micro-batch is divided over the devices of a stage (`plan.slices`), so between two stages each pair of devices exchanges the samples
that both have. All values of one micro-batch from one rank to another between two stages are one *message*. Messages are received in the
order in which they are sent, which both ranks read in the program; receives are posted ahead, so that they overlap with computing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from heterodyne.graph.cut import Value
from heterodyne.plan.plan import Stage
from heterodyne.plan.precision import Precision, between
from heterodyne.plan.program import Action
from heterodyne.plan.slices import overlap
from heterodyne.plan.traffic import MESSAGES_AHEAD
from heterodyne.runtime.comm.p2p import P2P, RecvWork

__all__ = ["Edge", "Team", "Transfers", "as_dtype", "dtype_of"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Message(NamedTuple):
    """``kind``: of the action that sends it; ``maker``, ``reader``: the stages between which it travels."""

    kind: Literal["SEND_F", "SEND_B"]
    maker: int
    reader: int
    micro_batch: int


class _Route(NamedTuple):
    """What of a value this rank exchanges with another one in a message.

    ``part``: ``(first, count)`` of the samples that it sends, or of the maker's own that come; ``shape``, ``dtype``: in which they go.
    """

    value: Value
    part: tuple[int, int]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Edge:
    """The values that stage ``maker`` makes and stage ``reader``, on another pipeline rank, reads."""

    maker: int
    reader: int
    values: tuple[Value, ...]

    @cached_property
    def differentiable(self) -> tuple[Value, ...]:
        return tuple(value for value in self.values if value.differentiable)


@dataclass(frozen=True, kw_only=True)
class Team:
    """The ranks of a pipeline. ``ranks[s]``: those that hold stage s, in the order of its devices; ``stages``: as the plan has them."""

    ranks: tuple[tuple[int, ...], ...]
    stages: tuple[Stage, ...]

    def slice_of(self, stage: int, rank: int, size: int) -> tuple[int, int]:
        """``(first sample, count)`` of a micro-batch of ``size`` samples that the rank receives and sends."""
        return self.stages[stage].slices(size)[self.ranks[stage].index(rank)]

    def works(self, stage: int, rank: int, size: int) -> bool:
        """Whether the rank works on any samples of the micro-batch, be it on such as it does not exchange with other stages."""
        return self.stages[stage].worked_on(size)[self.ranks[stage].index(rank)][1] > 0


class Transfers:
    """Sends and receives for the stages of one rank.

    Args:
        rank: this one.
        team: of its pipeline.
        edges: those that begin or end on this rank.
        p2p: carries the tensors.
        precisions: that each rank computes in; activations in fp32 go in the narrower one of both ends.

    Making one is collective over the ranks of the pipeline.
    """

    def __init__(
        self, *, rank: int, team: Team, edges: Sequence[Edge], p2p: P2P, precisions: Sequence[Precision]
    ) -> None:
        self._rank = rank
        self._precisions = precisions
        self._team = team
        # Both ends go through them in the same order.
        self._edges = {(edge.maker, edge.reader): edge for edge in sorted(edges, key=lambda e: (e.maker, e.reader))}
        self._p2p = p2p
        p2p.connect(self._partners())
        self._made = {stage: [e for e in self._edges.values() if e.maker == stage] for stage in range(len(team.ranks))}
        self._read = {stage: [e for e in self._edges.values() if e.reader == stage] for stage in range(len(team.ranks))}
        self._routes = cache(self._routes_of)  # the same in each step
        self._slice = cache(team.slice_of)
        self._program: Sequence[Sequence[Action]] = ()
        self._messages: dict[int, list[_Message]] = {}  # of that program, by sender
        self._sizes: Sequence[int] = ()
        self._expected: dict[int, list[_Message]] = {}
        self._posted: dict[tuple[int, _Message], list[RecvWork]] = {}

    def begin(self, program: Sequence[Sequence[Action]], sizes: Sequence[int], *, first: int = 0) -> None:
        """Start a step (or an evaluation): the actions of every rank, and the size of each micro-batch.

        ``first``: the number of its first micro-batch, from which those of its actions are counted; with another one than 0 the messages
        that earlier steps still wait for come first.
        """
        self._sizes = sizes
        if program is not self._program:
            others = {rank for ranks in self._team.ranks for rank in ranks} - {self._rank}
            self._program = program
            self._messages = {other: self._from(program[other]) for other in sorted(others)}
        coming = {
            other: [m._replace(micro_batch=first + m.micro_batch) for m in messages if first + m.micro_batch >= 0]
            for other, messages in self._messages.items()
        }
        if first:
            coming = {other: [*self._expected[other], *messages] for other, messages in coming.items()}
        else:
            self._posted = {}
        self._expected = coming
        for other in self._expected:
            self._make_room(other)

    def _size(self, micro_batch: int) -> int:
        return self._sizes[micro_batch % len(self._sizes)]

    def sends_back(self, stage: int) -> bool:
        """Whether the stage gives gradients to other places."""
        return any(edge.differentiable for edge in self._read[stage])

    def settle(self) -> None:
        """Wait until what was sent has left."""
        self._p2p.settle()

    def send_forward(self, stage: int, index: int, made: Mapping[str, Tensor]) -> None:
        """Send what other places read of a stage's values; ``made``: this rank's samples of them, by name."""
        for edge in self._made[stage]:
            for other, routes in self._routes("SEND_F", edge.maker, edge.reader, self._size(index), sends=True).items():
                for value, part, _, dtype in routes:
                    self._p2p.send(as_dtype(_rows(made[value.name], value, part), dtype), other)

    def send_backward(self, stage: int, index: int, gradients: Mapping[str, Tensor]) -> None:
        """Send the gradients of what a stage has received from other places."""
        for edge in self._read[stage]:
            for other, routes in self._routes("SEND_B", edge.maker, edge.reader, self._size(index), sends=True).items():
                for value, part, _, dtype in routes:
                    self._p2p.send(as_dtype(_rows(gradients[value.name], value, part), dtype), other)

    def receive_forward(self, stage: int, index: int) -> dict[str, Tensor]:
        """This rank's samples of the values that other places have made for a stage, by name."""
        received: dict[str, Tensor] = {}
        for edge in self._read[stage]:
            parts: dict[str, list[Tensor]] = {value.name: [] for value in edge.values}
            message = _Message("SEND_F", edge.maker, edge.reader, index)
            for other, routes in self._routes(*message[:3], self._size(index), sends=False).items():
                for arrival, (value, *_) in zip(self._open(other, message), routes, strict=True):
                    parts[value.name].append(as_dtype(arrival.wait(), dtype_of(value)))
            for value in edge.values:
                of = parts[value.name]
                if of:
                    received[value.name] = of[0] if len(of) == 1 else torch.cat(of, value.batch_dim or 0)
        return received

    def receive_backward(self, stage: int, index: int) -> dict[str, Tensor]:
        """The gradients of this rank's samples of a stage's values, summed over the stages of other places that read them."""
        total: dict[str, Tensor] = {}
        for edge in self._made[stage]:
            if not edge.differentiable:
                continue  # its reader sends nothing back, and has no action for it where it reads nothing else
            own = self._slice(edge.maker, self._rank, self._size(index))[1]
            found: dict[str, Tensor] = {}
            message = _Message("SEND_B", edge.maker, edge.reader, index)
            for other, routes in self._routes(*message[:3], self._size(index), sends=False).items():
                for arrival, (value, part, *_) in zip(self._open(other, message), routes, strict=True):
                    _put(found, value, as_dtype(arrival.wait(), dtype_of(value)), part, own)
            for name, gradient in found.items():
                total[name] = gradient if name not in total else total[name] + gradient
        return total

    def _partners(self) -> set[int]:
        """The ranks at the other ends of the edges."""
        partners: set[int] = set()
        for edge in self._edges.values():
            ends = [set(self._team.ranks[stage]) for stage in (edge.maker, edge.reader)]
            for own, other in (ends, ends[::-1]):
                if self._rank in own:
                    partners |= other
        return partners - {self._rank}

    def _routes_of(
        self, kind: Literal["SEND_F", "SEND_B"], maker: int, reader: int, size: int, *, sends: bool
    ) -> dict[int, tuple[_Route, ...]]:
        """What goes to, or comes from, each rank at the other end, of a micro-batch of that size, in order."""
        edge, forward = self._edges[maker, reader], kind == "SEND_F"
        makes = forward == sends  # this rank holds the stage that makes the values
        found: dict[int, tuple[_Route, ...]] = {}
        for other in self._team.ranks[reader if makes else maker]:
            routes = []
            for value in edge.values if forward else edge.differentiable:
                ends = (self._rank, other) if makes else (other, self._rank)
                part = self._part(value, maker, reader, *ends, size)
                if part is None:
                    continue
                first, count = part
                if sends and not forward:
                    first -= self._slice(reader, self._rank, size)[0] - self._slice(maker, other, size)[0]
                shape = tuple(int(of(count)) for of in value.shape)
                routes.append(_Route(value, (first, count), shape, self._sent_as(value, other)))
            found[other] = tuple(routes)
        return found

    def _part(self, value: Value, maker: int, reader: int, source: int, to: int, size: int) -> tuple[int, int] | None:
        """Which of the maker's own samples ``source`` and ``to`` exchange, from its first one on; None if they exchange nothing.

        A value that does not follow the batch comes from the first device that has any of the reader's samples.
        """
        if value.batch_dim is None and self._team.stages[reader].sharded:
            first_maker = next(rank for rank in self._team.ranks[maker] if self._slice(maker, rank, size)[1])
            works = self._team.works(reader, to, size)
            return (0, 1) if source == first_maker and works else None
        own, wanted = self._slice(maker, source, size), self._slice(reader, to, size)
        first, count = overlap(own, wanted)
        if not count:
            return None
        if value.batch_dim is None and first != wanted[0]:
            return None
        return first - own[0], count

    def _from(self, actions: Sequence[Action]) -> list[_Message]:
        """What another rank sends to this one, in its order."""
        messages = []
        for action in actions:
            if action.kind not in ("SEND_F", "SEND_B") or action.index is None:
                continue
            forward = action.kind == "SEND_F"
            for (maker, reader), edge in self._edges.items():
                mine, theirs = (reader, maker) if forward else (maker, reader)
                if (forward or edge.differentiable) and theirs == action.stage and self._rank in self._team.ranks[mine]:
                    kind: Literal["SEND_F", "SEND_B"] = "SEND_F" if forward else "SEND_B"
                    messages.append(_Message(kind, maker, reader, action.index))
        return messages

    def _make_room(self, other: int, upto: _Message | None = None) -> None:
        """Post receives for the next messages of a rank; for all up to one, if that is named."""
        waiting = self._expected[other]
        open_ = sum(source == other for source, _ in self._posted)
        while waiting and (open_ < MESSAGES_AHEAD or (upto is not None and (other, upto) not in self._posted)):
            message = waiting.pop(0)
            self._posted[other, message] = self._post(other, message)
            open_ += 1

    def _post(self, other: int, message: _Message) -> list[RecvWork]:
        routes = self._routes(*message[:3], self._size(message.micro_batch), sends=False)[other]
        return [self._p2p.receive(route.shape, route.dtype, other) for route in routes]

    def _sent_as(self, value: Value, other: int) -> torch.dtype:
        """In which dtype this rank and another exchange a value and its gradient."""
        precision = between(self._precisions[self._rank], self._precisions[other])
        narrow = value.differentiable and value.dtype == "float32" and precision != "fp32"
        return _DTYPES[precision] if narrow else dtype_of(value)

    def _open(self, other: int, message: _Message) -> list[RecvWork]:
        self._make_room(other, message)
        arrivals = self._posted.pop((other, message))
        self._make_room(other)
        return arrivals


def dtype_of(value: Value) -> torch.dtype:
    """That it was traced in."""
    found: torch.dtype = getattr(torch, value.dtype)
    return found


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _rows(tensor: Tensor, value: Value, part: tuple[int, int]) -> Tensor:
    """The rows of some samples."""
    if value.batch_dim is None:
        return tensor
    first, count = part[0] * value.rows_a_sample, part[1] * value.rows_a_sample
    if count == tensor.shape[value.batch_dim]:
        return tensor
    return tensor.narrow(value.batch_dim, first, count)


def _put(found: dict[str, Tensor], value: Value, gradient: Tensor, part: tuple[int, int], samples: int) -> None:
    """Lay the gradient of some samples into that of all of them."""
    if value.batch_dim is None:
        found[value.name] = gradient if value.name not in found else found[value.name] + gradient
    elif part == (0, samples):
        found[value.name] = gradient
    else:
        if value.name not in found:
            found[value.name] = gradient.new_zeros(tuple(int(size(samples)) for size in value.shape))
        _rows(found[value.name], value, part).copy_(gradient)
