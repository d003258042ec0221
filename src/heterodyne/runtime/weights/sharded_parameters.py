"""Parameters of which each device keeps one range, and all of them only while a stage runs (ZeRO-3).

A bucket is one flat tensor, and its parameters are views into it. While they are gathered its memory is there; between, only the own range
is kept, apart from it. What a forward has saved of a parameter is a view of the flat tensor too, so it is good again when the backward
has it gathered once more: the memory of a tensor comes and goes, the tensor stays. A parameter that is let go of has its shape, takes no
memory, and is not a number wherever it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from heterodyne.plan.buckets import Bucket
from heterodyne.plan.state_shards import Range
from heterodyne.runtime.comm.channel import Channel
from heterodyne.runtime.comm.work import Work

__all__ = ["ShardedParameters"]


@dataclass(eq=False)
class _Flat:
    """``flat``: has memory only while one of ``users`` needs it. ``own``: the range of it that this rank keeps. ``parts``: where its
    parameters begin."""

    flat: Tensor
    own: Tensor
    ranges: Sequence[Range]
    channel: Channel
    parts: list[tuple[nn.Parameter, int]]
    users: set[int] = field(default_factory=set)
    pending: Work | None = None

    def gather(self, *, timed: bool) -> Work:
        low, high = self.ranges[self.channel.place]
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        self.flat[low:high].copy_(self.own)
        self.pending = self.channel.all_gather_ranges(self.flat, self.ranges, timed=timed)
        return self.pending

    def wait(self) -> None:
        if self.pending is None:
            return
        self.pending.wait()
        self.pending = None
        for parameter, begin in self.parts:
            parameter.data = self.flat[begin : begin + parameter.numel()].view(parameter.shape)

    def let_go(self) -> None:
        for parameter, _ in self.parts:
            parameter.data = torch.full((), torch.nan, dtype=self.flat.dtype, device=self.flat.device).expand(
                parameter.shape
            )
        self.flat.untyped_storage().resize_(0)


class ShardedParameters:
    """The parameters of one rank that it shares out with others.

    Args:
        parameters: of this rank by name, with their values; they are let go of at once.
        buckets: of the plan, those of this rank, with the channel that joins their owners.
        ranges: by number of a bucket, the range of each rank of its channel.
        readers: by number of a bucket, the stages of this rank that read any of it.

    ``own``: by name, what this rank keeps of each, row after row; it may be nothing.
    """

    @torch.no_grad()
    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[tuple[Bucket, Channel | None]],
        ranges: Mapping[int, Sequence[Range]],
        readers: Mapping[int, Sequence[int]],
    ) -> None:
        self.own: dict[str, Tensor] = {}
        self._of_stage: dict[int, list[_Flat]] = {}
        for bucket, channel in buckets:
            if channel is None or bucket.index not in ranges:
                continue
            made = self._made(bucket, channel, ranges[bucket.index], parameters)
            for stage in readers.get(bucket.index, ()):
                self._of_stage.setdefault(stage, []).append(made)

    def _made(
        self, bucket: Bucket, channel: Channel, ranges: Sequence[Range], parameters: Mapping[str, nn.Parameter]
    ) -> _Flat:
        low, high = ranges[channel.place]
        of = [parameters[name] for name in bucket.parameters]
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in of])
        made = _Flat(flat=flat, own=flat[low:high].clone(), ranges=ranges, channel=channel, parts=[])
        begin = 0
        for name, parameter in zip(bucket.parameters, of, strict=True):
            size = parameter.numel()
            first, last = max(low, begin), min(high, begin + size)
            self.own[name] = made.own[first - low : last - low] if first < last else made.own[:0]
            made.parts.append((parameter, begin))
            begin += size
        made.let_go()
        return made

    @torch.no_grad()
    def unshard(self, stage: int, *, timed: bool = False) -> Work:
        """Start to gather the parameters of a stage; the last of what is under way. Collective among the devices of the stage."""
        last = Work(timed=timed)
        for each in self._of_stage.get(stage, ()):
            if not each.users:
                last = each.gather(timed=timed)
            each.users.add(stage)
        return last

    def wait(self, stage: int) -> None:
        """Wait until the parameters of a stage are there."""
        for each in self._of_stage.get(stage, ()):
            each.wait()

    def reshard(self, stage: int) -> None:
        """Let go of what no other stage that is gathered needs."""
        for each in self._of_stage.get(stage, ()):
            each.wait()
            each.users.discard(stage)
            if not each.users:
                each.let_go()

    @contextmanager
    def unsharded(self, stage: int) -> Iterator[None]:
        """The parameters of a stage are there while the block runs. Collective."""
        self.unshard(stage)
        self.wait(stage)
        try:
            yield
        finally:
            self.reshard(stage)
