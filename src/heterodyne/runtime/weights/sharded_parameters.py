"""Parameters of which each device keeps one range, and all of them only while a stage runs (ZeRO-3).

A bucket is one flat tensor, and its parameters are views into it. While they are gathered its memory is there; between, only the own range
is kept, apart from it. What a forward has saved of a parameter is a view of the flat tensor too, so it is good again when the backward
has it gathered once more: the memory of a tensor comes and goes, the tensor stays. A parameter that is let go of has its shape, takes no
memory, and is not a number wherever it is read.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import inf, isnan, nan

import torch
from torch import Tensor, nn

from heterodyne.errors import PlanError
from heterodyne.plan.buckets import Bucket
from heterodyne.plan.state_shards import Range
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.comm.work import Work

__all__ = ["ShardedParameters", "require_no_write"]

_SHARED_MEMORY = "refers to a single memory location"


@dataclass(eq=False)
class _Flat:
    """``flat``: has memory only while it is gathered. ``own``: the range of it that this rank keeps. ``parts``: where its parameters
    begin."""

    flat: Tensor
    own: Tensor
    ranges: Sequence[Range]
    process_group: ProcessGroup
    parts: list[tuple[nn.Parameter, int]]
    hollow: _Hollow
    pending: Work | None = None

    def gather(self, *, timed: bool) -> Work:
        low, high = self.ranges[self.process_group.place]
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        self.flat[low:high].copy_(self.own)
        self.pending = self.process_group.all_gather_ranges(self.flat, self.ranges, own=self.own, timed=timed)
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
            parameter.data = self.hollow.like(parameter)
        self.flat.untyped_storage().resize_(0)


class _Hollow:
    """What stands for parameters that were let go of: one element of each dtype on ``device``.

    It is not a number. One parameter of one element can be written into as it is, and what clamps or scales it would leave no trace in
    that: it is the largest number.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._elements: dict[tuple[torch.dtype, float], Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Of its shape; takes no memory."""
        return self._element(tensor).expand(tensor.shape)

    def stands_for(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor is still this."""
        return tensor.data_ptr() == self._element(tensor).data_ptr()

    @property
    def filled(self) -> bool:
        """Whether something was written into it."""
        return any(
            not bool(element.isnan() if isnan(value) else element == value)
            for (_, value), element in self._elements.items()
        )

    def _element(self, like: Tensor) -> Tensor:
        value = torch.finfo(like.dtype).max if like.numel() == 1 else nan
        if (like.dtype, value) not in self._elements:
            self._elements[like.dtype, value] = torch.full((), value, dtype=like.dtype, device=self._device)
        return self._elements[like.dtype, value]


def require_no_write(error: BaseException | None) -> None:
    """Raises PlanError, with the line, for an error by which torch refuses to write into a parameter that has no values here."""
    if isinstance(error, RuntimeError) and _SHARED_MEMORY in str(error):
        place = traceback.extract_tb(error.__traceback__)[-1:]
        where = "".join(f"{frame.filename}:{frame.lineno}: {frame.line}\n" for frame in place)
        raise _written(f"{where}a parameter is changed in place") from error


def _written(what: str) -> PlanError:
    return PlanError(
        f"{what} between two steps, and under this plan each device keeps a part of it elsewhere ('zero': 3). Change weights in a "
        "state_dict() of the trainer and load_state_dict() that, or write 'zero': 2"
    )


class ShardedParameters:
    """The parameters of one rank that it shares out with others.

    Args:
        buckets: of the plan, those of this rank, with the process group that joins their owners.
        ranges: by number of a bucket, the range of each rank of its process group.
        readers: by number of a bucket, the stages of this rank that read any of it.
        slices: by name, the elements of a parameter that this rank keeps, row after row; there may be none.
        device: of this rank.

    Its parameters come one after the other (`keep`), so that no more than one is whole; then `bind`.

    ``own``: by name, what this rank keeps of each, row after row; it may be nothing.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[Bucket, ProcessGroup | None]],
        ranges: Mapping[int, Sequence[Range]],
        readers: Mapping[int, Sequence[int]],
        slices: Mapping[str, Range],
        device: torch.device,
    ) -> None:
        self.own: dict[str, Tensor] = {}
        self._device = device
        self._buckets = [
            (bucket, process_group) for bucket, process_group in buckets if process_group and bucket.index in ranges
        ]
        self._ranges = ranges
        self._readers = readers
        # One without elements is there as it is: nobody has a part of it.
        self._shared = frozenset(name for bucket, _ in self._buckets for name in bucket.parameters if name in slices)
        self._slices = slices
        self._flats: dict[int, _Flat] = {}  # by bucket
        self._hollow = _Hollow(device)

    @torch.no_grad()
    def keep(self, name: str, value: Tensor) -> Tensor:
        """What a parameter of that value is to have here: the own range is kept, the rest let go of; all of one that is not shared."""
        if name not in self._shared:
            return value
        start, stop = self._slices[name]
        self.own[name] = value.reshape(-1)[start:stop].to(self._device, copy=True)
        return self._hollow.like(value)

    @torch.no_grad()
    def bind(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """All are kept; these are the parameters of the model."""
        for bucket, process_group in self._buckets:
            names = [name for name in bucket.parameters if name in self._shared]
            if not names:
                continue
            kept = [self.own[name] for name in names]
            own = torch.cat(kept)
            sizes = [parameters[name].numel() for name in names]
            flat = own.new_empty(sum(sizes))
            begins = accumulate(sizes, initial=0)
            of = [(parameters[name], begin) for name, begin in zip(names, begins, strict=False)]
            made = _Flat(
                flat=flat,
                own=own,
                ranges=self._ranges[bucket.index],
                process_group=process_group,
                parts=of,
                hollow=self._hollow,
            )
            flat.untyped_storage().resize_(0)
            self.own |= dict(zip(names, own.split_with_sizes([part.numel() for part in kept]), strict=True))
            self._flats[bucket.index] = made

    def require_untouched(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Between steps, of all that are kept. Raises PlanError where one was given other values, which nobody would read."""
        for name in self._shared:
            parameter = parameters[name]
            if parameter.numel() and not self._hollow.stands_for(parameter):
                raise _written(f"{name!r} was given other values (.data =)")
        if self._hollow.filled:
            raise _written("a parameter was written into")

    @torch.no_grad()
    def unshard(self, bucket: int, *, timed: bool = False) -> Work:
        """Start to gather the parameters of a bucket. Collective among its owners."""
        flat = self._flats.get(bucket)
        return Work(timed=timed) if flat is None else flat.gather(timed=timed)

    def wait(self, stage: int) -> None:
        """Wait until all that was gathered for a stage is there."""
        for bucket, flat in self._flats.items():
            if stage in self._readers.get(bucket, ()):
                flat.wait()

    def reshard(self, bucket: int) -> None:
        """Let go of its parameters, but for the own range."""
        if bucket in self._flats:
            self._flats[bucket].wait()
            self._flats[bucket].let_go()

    @contextmanager
    def unsharded(self, stage: int) -> Iterator[None]:
        """The parameters of a stage are there while the block runs. Collective, and as often for all owners of what it reads."""
        wanted = [bucket for bucket in self._flats if stage in self._readers.get(bucket, ())]
        for bucket in wanted:
            self.unshard(bucket)
        self.wait(stage)
        try:
            yield
        finally:
            for bucket in wanted:
                self.reshard(bucket)

    @contextmanager
    def in_turn(self, *, all_at_once: bool) -> Iterator[Callable[[int], None]]:
        """Yields what is to be called before each stage, in their order: it gathers what that reads, and lets go of what no later one does.

        Every bucket is gathered once, in one order, whoever reads it in which of how many stages. Collective. ``all_at_once``: stages
        come in any order, so all are gathered at first, and let go of at the end.
        """
        left, there = deque(sorted(self._flats, reverse=True)), set[int]()

        def gather(upto: int) -> None:
            while left and left[0] >= upto:
                there.add(left[0])
                self.unshard(left.popleft())

        def let_go(before: float) -> None:
            for bucket in [each for each in there if max(self._readers.get(each, ()), default=-1) < before]:
                there.discard(bucket)
                self.reshard(bucket)

        def go_on(stage: int) -> None:
            if not all_at_once:
                let_go(stage)
            gather(
                min(
                    (bucket for bucket in left if stage in self._readers.get(bucket, ())),
                    default=1 + max(left, default=0),
                )
            )
            self.wait(stage)

        if all_at_once:
            gather(0)
        try:
            yield go_on
        finally:
            gather(0)
            let_go(inf)
