"""Gradients in flat buckets, reduced while the backward still goes on.

Buckets are those of `plan.buckets`, so every rank and the simulator cut them alike. A bucket is one flat buffer; each
``p.grad`` is a view into it. The first gradient of a step is copied into the view, those of later micro-batches are added
in place, so there is never more than one copy of a bucket. A rank that reduces with no other one has no need of buffers, and
its gradients stay where autograd puts them. In the last backward of the step a bucket is *launched* (its
all-reduce is started) as soon as its gradients and all buckets before it are complete; the order is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from heterodyne.errors import CaptureError
from heterodyne.plan.buckets import Bucket
from heterodyne.runtime.meeting.communicator import Channel, Pending
from heterodyne.runtime.records.recorder import Recorder

__all__ = ["GradientBuckets"]


@dataclass(eq=False)
class _Entry:
    """A parameter's place in its bucket. ``filled``: it has a gradient in this step; ``ready``: that is complete."""

    name: str
    parameter: nn.Parameter
    view: Tensor | None
    bucket: int
    filled: bool = False
    ready: bool = False


@dataclass(eq=False)
class _Flat:
    """``missing``: parameters whose gradient the last backward still owes."""

    buffer: Tensor | None
    entries: list[_Entry] = field(default_factory=list)
    missing: int = 0
    pending: Pending | None = None


class GradientBuckets:
    """The gradients of one worker over one step: `begin`, backwards (`arm` before the last), `launch`, `wait`.

    Args:
        parameters: every trainable parameter by its canonical name, on its device.
        buckets: from `plan.buckets.gradient_buckets`.
        channel: joins the ranks whose gradients are summed; None, or of one rank: this worker is alone with its gradients.
        recorder: is told when each reduction starts and ends.

    A parameter that got no gradient in a step counts as zero, and is launched as such after the backward. One that no rank
    has a gradient for keeps ``grad=None``, as on one device, so that the optimizer leaves it alone.

    Raises CaptureError for a parameter with hooks of the user's, and in a backward that goes another way than those before.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        channel: Channel | None,
        recorder: Recorder,
    ) -> None:
        self._channel = channel if channel is not None and len(channel.ranks) > 1 else None
        self._recorder = recorder
        self._buckets = self._allocate(buckets, parameters)
        self._entries = [entry for bucket in self._buckets for entry in bucket.entries]
        self._untouched: frozenset[str] | None = None
        self._armed = False
        self._next = 0
        self._hooks = [_on_gradient(entry.parameter, self._hook(entry)) for entry in self._entries]

    def begin(self) -> None:
        """Start a step: every gradient is None, nothing is launched."""
        untouched = self._untouched or frozenset()
        for entry in self._entries:
            entry.parameter.grad = None
            entry.filled = entry.ready = False
        for bucket in self._buckets:
            bucket.missing = sum(entry.name not in untouched for entry in bucket.entries)
            bucket.pending = None
        self._armed = False
        self._next = 0

    def arm(self) -> None:
        """The backward that follows is the last one of this step."""
        self._armed = True

    def launch(self, index: int) -> None:
        """See to it that buckets up to ``index`` are launched; what is still missing in them is zero."""
        while self._next <= index:
            self._launch_next()

    def wait(self) -> None:
        """Wait for every launched bucket. Then ``p.grad`` is the sum over the ranks, or None where no rank has a gradient."""
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
        if self._untouched is None and self._entries and self._next == len(self._buckets):
            self._untouched = self._find_untouched()
        for entry in self._entries:
            if self._untouched and entry.name in self._untouched:
                entry.parameter.grad = None

    def _find_untouched(self) -> frozenset[str]:
        """The parameters that no rank has a gradient for. A captured graph is static, so this is asked once."""
        filled = [float(entry.filled) for entry in self._entries]
        touched = torch.tensor(filled, device=self._entries[0].parameter.device)
        if self._channel is not None:
            self._channel.all_reduce(touched).wait()
        return frozenset(e.name for e, count in zip(self._entries, touched.tolist(), strict=True) if not count)

    def close(self) -> None:
        """Take the hooks off the user's parameters, and let their gradients go."""
        for hook in self._hooks:
            hook.remove()
        for entry in self._entries:
            entry.parameter.grad = None

    def _allocate(self, buckets: Sequence[Bucket], parameters: Mapping[str, nn.Parameter]) -> list[_Flat]:
        for bucket in buckets:
            for name in bucket.parameters:
                _require_no_hooks(name, parameters[name])
        if self._channel is None:
            return [
                _Flat(None, [_Entry(name, parameters[name], None, bucket.index) for name in bucket.parameters])
                for bucket in buckets
            ]
        own = [[parameters[name] for name in bucket.parameters] for bucket in buckets]
        buffers = self._channel.buffers([(sum(p.numel() for p in of_bucket), of_bucket[0].dtype) for of_bucket in own])
        flats = []
        for buffer, bucket in zip(buffers, buckets, strict=True):
            entries, offset = [], 0
            for name in bucket.parameters:
                parameter = parameters[name]
                entries.append(_Entry(name, parameter, _view(buffer, offset, parameter), bucket.index))
                offset += parameter.numel()
            flats.append(_Flat(buffer, entries))
        return flats

    def _hook(self, entry: _Entry) -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise CaptureError(
                    f"{entry.name!r} has a sparse gradient, and gradients are reduced in flat buckets: make its embedding with sparse=False"
                )
            if entry.view is not None and parameter.grad is not None and parameter.grad is not entry.view:
                entry.view.copy_(parameter.grad)
                parameter.grad = entry.view
            if self._untouched and entry.name in self._untouched:
                raise CaptureError(
                    f"{entry.name!r} got a gradient, which it had not in the first step: the model goes another way from step to step, "
                    "by chance, by a counter or by a choice in Python. Let it do the same in each step"
                )
            entry.filled = True
            if self._armed:
                self._mark_ready(entry)

        return on_gradient

    def _mark_ready(self, entry: _Entry) -> None:
        bucket = self._buckets[entry.bucket]
        if entry.ready or bucket.pending is not None:
            raise CaptureError(
                f"the gradient of {entry.name!r} came after its bucket was reduced. Does the model use it in a part that "
                "depends on the data, or in two parts with reentrant checkpointing? Use torch.utils.checkpoint with use_reentrant=False"
            )
        entry.ready = True
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        for entry in bucket.entries:
            if entry.view is not None and not entry.filled:
                entry.parameter.grad = entry.view.zero_()
        bucket.pending = self._reduce(self._next, bucket.buffer)
        self._next += 1

    def _reduce(self, index: int, buffer: Tensor | None) -> Pending:
        started, timed = self._recorder.now(), self._recorder.on
        if self._channel is None or buffer is None:
            pending = Pending(timed=timed)
        else:
            pending = self._channel.all_reduce(buffer, timed=timed)
        self._recorder.collective("REDUCE_GRAD", index, started, pending)
        return pending


def _on_gradient(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def _require_no_hooks(name: str, parameter: nn.Parameter) -> None:
    """A hook sees the gradient of one micro-batch of one device, and only if it is linear does that come to the same."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise CaptureError(
            f"{name!r} has a hook on its gradient, which would see the gradients of parts of the batch in place of the whole. Remove it: "
            "gradients are clipped by clip_grad_norm, and what shall not be trained can be a buffer, or be masked in forward"
        )


def _view(buffer: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    """A view shaped as the parameter, with its strides where it is dense in channels-last order."""
    channels_last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    if channels_last and not parameter.is_contiguous():
        return buffer.as_strided(parameter.shape, parameter.stride(), offset)
    return buffer[offset : offset + parameter.numel()].view(parameter.shape)
