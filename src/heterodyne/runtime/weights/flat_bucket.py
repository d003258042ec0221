"""A bucket of gradients as one rank has it: a flat buffer, and the place of each parameter in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from heterodyne.errors import HeterodyneError
from heterodyne.plan.boxes import Box, inside, numel
from heterodyne.plan.buckets import Bucket
from heterodyne.plan.state_shards import Range
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.comm.work import Work
from heterodyne.runtime.weights.boxed import boxed
from heterodyne.runtime.weights.masters import gradient_dtype

__all__ = ["Entry", "FlatBucket", "size_of"]


@dataclass(eq=False)
class Entry:
    """The place of a parameter, or of a box of it, in its bucket.

    ``box``: of the parameter as it is on this rank; () is all of it. ``filled``: it has a gradient in this step; ``ready``: that is
    complete.
    """

    name: str
    parameter: nn.Parameter
    view: Tensor | None
    bucket: int
    box: Box = ()
    filled: bool = False
    ready: bool = False

    @property
    def staged(self) -> bool:
        """Its gradient is one of several boxes, so it is copied into the bucket and back."""
        return bool(self.box) and self.view is not None

    def of_gradient(self) -> Tensor:
        """The box of the parameter's gradient, which is zero where there was none."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter, dtype=gradient_dtype(self.parameter))
        return boxed(self.parameter.grad, self.box)


@dataclass(eq=False)
class FlatBucket:
    """``number``: in the plan. ``size``: of the buffer.

    ``comes_and_goes``: gradients are sharded, so the buffer is there only while it is needed. ``ranges``: which each rank of the
    process group updates, where state is sharded. ``places``: the addresses of the buffer and of the entries' views. ``missing``:
    parameters whose gradient the last backward still owes.
    """

    number: int
    size: tuple[int, torch.dtype]
    buffer: Tensor | None
    process_group: ProcessGroup | None
    comes_and_goes: bool
    ranges: Sequence[Range] | None = None
    entries: list[Entry] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    missing: int = 0
    pending: Work | None = None
    given_back: bool = False

    @property
    def as_weights(self) -> Tensor:
        """The begin of the buffer, as elements of the weights, which may be narrower than their gradients."""
        assert self.buffer is not None
        return self.buffer.view(self.entries[0].parameter.dtype)[: self.buffer.numel()]

    def own(self) -> Iterator[tuple[Entry, Range, Range]]:
        """Of the parameters of which this rank updates anything: which elements, in the bucket and in the parameter."""
        if self.ranges is None or self.process_group is None:
            return
        (low, high), begin = self.ranges[self.process_group.place], 0
        for entry in self.entries:
            first, last = max(low, begin), min(high, begin + entry.parameter.numel())
            if first < last:
                yield entry, (first, last), (first - begin, last - begin)
            begin += entry.parameter.numel()

    def open(self) -> None:
        """Make the buffer, if it is not there; nothing is in it yet."""
        if not self.comes_and_goes or self.buffer is not None:
            return
        size, dtype = self.size
        self.buffer = torch.empty(size, dtype=dtype, device=self.entries[0].parameter.device)
        self.attach()

    def attach(self) -> None:
        """Give each entry its view of the buffer."""
        assert self.buffer is not None
        begin = 0
        for entry in self.entries:
            entry.view = _view_of(self.buffer, begin, entry.parameter, entry.box, by_rows=self.ranges is not None)
            begin += entry.view.numel()
        self.places = self._places_now()

    def require_in_place(self) -> None:
        """Attach views anew that a move of the model between two steps, as ``model.to(memory_format=...)``, has put elsewhere.

        Raises HeterodyneError if the memory that the ranks reduce in is not where it was, as after ``model.share_memory()``.
        """
        if self.buffer is None or (now := self._places_now()) == self.places:
            return
        if now[0] != self.places[0]:
            raise HeterodyneError(
                f"the memory of the gradients of {', '.join(repr(entry.name) for entry in self.entries[:3])} was moved between two steps, "
                "as model.share_memory() does, and other ranks read it where it was: move the model before distribute"
            )
        self.attach()

    def _places_now(self) -> list[int]:
        assert self.buffer is not None
        return [self.buffer.data_ptr(), *(e.view.data_ptr() for e in self.entries if e.view is not None)]

    def close(self) -> None:
        """Let go of a buffer that is not there all the time."""
        if self.comes_and_goes:
            for entry in self.entries:
                entry.parameter.grad = entry.view = None
            self.buffer = None


def size_of(
    bucket: Bucket, parameters: Mapping[str, nn.Parameter], boxes: Mapping[str, Box]
) -> tuple[int, torch.dtype]:
    """Elements and dtype of its buffer; ``boxes``: of the parameters of which the rank has a box."""
    sizes = [numel(inside(boxes.get(p.name, ()), p.box), parameters[p.name].shape) for p in bucket.parts]
    return sum(sizes), gradient_dtype(parameters[bucket.parts[0].name])


def _view_of(buffer: Tensor, offset: int, parameter: nn.Parameter, box: Box, *, by_rows: bool) -> Tensor:
    """A view shaped as the parameter, or a box of it, with its strides where it is dense in channels-last order, unless ``by_rows``."""
    channels_last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    if not by_rows and not box and channels_last and not parameter.is_contiguous():
        return buffer.as_strided(parameter.shape, parameter.stride(), offset)
    shape = boxed(parameter.detach(), box).shape
    return buffer[offset : offset + shape.numel()].view(shape)
