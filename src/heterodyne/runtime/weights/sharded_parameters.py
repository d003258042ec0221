"""Parameters of which each device keeps one range, and all of them only while a stage runs (ZeRO-3).

A bucket is one flat tensor, and its parameters are views into it. While they are gathered its memory is there; between, only the own range
is kept, apart from it. What a forward has saved of a parameter is a view of the flat tensor too, so it is good again when the backward
has it gathered once more: the memory of a tensor comes and goes, the tensor stays. A parameter that is let go of has its shape, takes the
memory of one element, and is not a number wherever it is read. One of a single element is itself where it is kept, so that what is written
to it between two steps is what the others get.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import torch
from torch import Tensor, nn

from heterodyne.errors import PlanError
from heterodyne.plan.buckets import Bucket
from heterodyne.plan.state_shards import Range
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.comm.work import Work

__all__ = ["ShardedParameters"]


@dataclass(eq=False)
class _Flat:
    """``flat``: has memory only while it is gathered. ``own``: the range of it that this rank keeps. ``parts``: its parameters,
    where each begins, and what it is between."""

    flat: Tensor
    own: Tensor
    ranges: Sequence[Range]
    process_group: ProcessGroup
    parts: list[tuple[nn.Parameter, int, Tensor]]
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
        for parameter, begin, _ in self.parts:
            parameter.data = self.flat[begin : begin + parameter.numel()].view(parameter.shape)

    def let_go(self) -> None:
        for parameter, _, hollow in self.parts:
            parameter.data = hollow
        self.flat.untyped_storage().resize_(0)


def _hollow(like: Tensor, device: torch.device) -> Tensor:
    """Of the shape of a tensor; takes no memory, and is not a number."""
    return torch.full((), torch.nan, dtype=like.dtype, device=device).expand(like.shape)


def _written(what: str) -> PlanError:
    return PlanError(
        f"{what} between two steps, and under this plan each device keeps a part of it elsewhere ('zero': 3). Change weights inside of "
        "'with trainer.whole_weights() as model:', or write 'zero': 2"
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
        self._hollows: list[tuple[list[str], Tensor]] = []  # of each dtype the parameters, and an element for each
        self._parameters: Mapping[str, nn.Parameter] = {}

    @torch.no_grad()
    def keep(self, name: str, value: Tensor) -> Tensor:
        """What a parameter of that value is to have here: the own range is kept, the rest let go of; all of one that is not shared."""
        if name not in self._shared:
            return value
        start, stop = self._slices[name]
        self.own[name] = value.reshape(-1)[start:stop].to(self._device, copy=True)
        return _hollow(value, self._device)

    @torch.no_grad()
    def bind(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """All are kept; these are the parameters of the model."""
        self._parameters = parameters
        hollow = self._hollow_all(parameters)
        for bucket, process_group in self._buckets:
            names = [name for name in bucket.parameters if name in self._shared]
            if not names:
                continue
            kept = [self.own[name] for name in names]
            own = torch.cat(kept)
            self.own |= dict(zip(names, own.split_with_sizes([part.numel() for part in kept]), strict=True))
            sizes = [parameters[name].numel() for name in names]
            flat = own.new_empty(sum(sizes))
            begins = accumulate(sizes, initial=0)
            between = [self.own[n].view(hollow[n].shape) if self._is_kept(n, hollow[n]) else hollow[n] for n in names]
            of = [(parameters[n], begin, left) for n, begin, left in zip(names, begins, between, strict=False)]
            made = _Flat(flat=flat, own=own, ranges=self._ranges[bucket.index], process_group=process_group, parts=of)
            self._flats[bucket.index] = made
            made.let_go()

    def _hollow_all(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """What they are while nobody needs them. All of a dtype share one tensor, so that one look at it tells if any was written to."""
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name in parameters:
            if name in self._shared:
                by_dtype.setdefault(parameters[name].dtype, []).append(name)
        found: dict[str, Tensor] = {}
        for dtype, names in by_dtype.items():
            elements = torch.full((len(names),), torch.nan, dtype=dtype, device=self._device)
            self._hollows.append((names, elements))
            found |= {n: one.expand(parameters[n].shape) for n, one in zip(names, elements.unbind(), strict=True)}
        return found

    def _is_kept(self, name: str, hollow: Tensor) -> bool:
        """Whether it is one element, and that one here."""
        return hollow.numel() == 1 == self.own[name].numel()

    @torch.no_grad()
    def require_untouched(self) -> None:
        """Between steps, of all that are kept. Raises PlanError for one that was given other values, which nobody would read.

        One of several elements refuses most writes by itself, since all of these are one memory; ``fill_`` it does not.
        """
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        parts = [part for flat in self._flats.values() for part in flat.parts]
        given = [names[id(parameter)] for parameter, _, between in parts if parameter.data_ptr() != between.data_ptr()]
        for of, elements in self._hollows:
            if not elements.isnan().all():
                given += [
                    n for n, own in zip(of, elements, strict=True) if own == own and self._parameters[n].numel() > 1
                ]
        if given:
            raise _written(f"{given[0]!r} was given other values")

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
