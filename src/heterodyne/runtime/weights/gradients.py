"""Gradients in flat buckets, reduced while the backward still goes on.

Buckets are those of `plan.buckets`, so every rank and the simulator cut them alike. A bucket that is shared with other ranks
is one flat buffer; each ``p.grad`` is a view into it. The first gradient of a step is copied into the view, those of later
micro-batches are added in place, so there is never more than one copy of a bucket. What a rank has to itself needs no buffer, and
its gradients stay where autograd puts them. In the last backward of a stage a bucket is *launched* (its
all-reduce is started) as soon as its gradients and all buckets before it are complete; the order is the same on every rank.

Where the owners of a bucket shard its state, each gets the sums of its own range alone, and the buffer carries the new weights back
(`gather`). What else is in it is then no gradient, so it is taken away. Where gradients are sharded too, a buffer is there only
from the first gradient of its bucket until it is reduced; then the own range is kept, apart from the parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from heterodyne.errors import CaptureError
from heterodyne.plan.boxes import Box, inside
from heterodyne.plan.buckets import BUCKETS_UNDER_WAY, Bucket
from heterodyne.plan.program import Action, ActionKind
from heterodyne.plan.state_shards import Range
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.comm.work import Work
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.weights.between_steps import byte_sum
from heterodyne.runtime.weights.flat_bucket import Entry, FlatBucket, size_of
from heterodyne.runtime.weights.masters import MasterWeights

__all__ = ["GradientBuckets", "refusal_of_hook", "require_no_hooks"]


class GradientBuckets:
    """The gradients of one worker over one step: `begin`, backwards (`begin_last_backward` before the last of a stage), `launch`, `wait`.

    Args:
        parameters: every trainable parameter of this rank by its canonical name, on its device.
        buckets: those of the plan that hold any of them, with the process group that joins the ranks whose gradients are summed; None, or
            one of one rank: this worker is alone with them.
        recorder: is informed when each reduction starts and ends.
        boxes: of the parameters of which this rank has a box.
        ranges: by number of a bucket whose state is sharded, the range of each rank of its process group.
        weights: what this rank updates, where gradients are sharded too: takes those of its own ranges; None: they are not.
        same_way: every forward goes the same way, so which parameters get no gradient at all is found out once; else whenever `differs`
            is true on any rank, which the caller tells by `wait`.

    A parameter that got no gradient in a step counts as zero, and is launched as such after the backward. One that no rank
    has a gradient for, or that is frozen when a step begins, keeps ``grad=None``, as on one device, so that the optimizer leaves it alone.

    Raises CaptureError for a parameter with hooks of the user's, and in a backward that goes another way than those before.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[tuple[Bucket, ProcessGroup | None]],
        recorder: Recorder,
        boxes: Mapping[str, Box] | None = None,
        ranges: Mapping[int, Sequence[Range]] | None = None,
        *,
        weights: MasterWeights | None = None,
        same_way: bool = True,
    ) -> None:
        self._boxes = boxes or {}
        self._ranges = ranges or {}
        self._weights = weights
        self._reducing: deque[FlatBucket] = deque()
        self._gathering: deque[tuple[FlatBucket, Work]] = deque()
        self.same_way = same_way
        self._recorder = recorder
        self._completed: Mapping[int, frozenset[str]] = {}
        self._buckets = self._allocate(buckets, parameters)
        self._entries = [entry for bucket in self._buckets for entry in bucket.entries]
        self._entries_of: dict[int, list[Entry]] = {}
        for entry in self._entries:
            self._entries_of.setdefault(id(entry.parameter), []).append(entry)
        shared = {
            entry.name for bucket in self._buckets if bucket.process_group is not None for entry in bucket.entries
        }
        self._alone = [entry for entry in self._entries if entry.name not in shared]  # nobody waits for these gradients
        self._unused: frozenset[str] | None = None
        self._beyond: list[
            Entry
        ] = []  # what the gradient of the loss does not reach: behind a detach pieces of a graph give zeros
        self._without: frozenset[str] = frozenset()  # the parameters that have no gradient after the latest step
        self._filled: list[bool] | None = None  # of each entry, when the unused ones were last looked for
        self._frozen: frozenset[str] = frozenset()
        self._armed: frozenset[str] = frozenset()
        self._in_step = False
        self._next = 0
        self._hooks = [
            _on_gradient(of[0].parameter, self._hook(of) if of[0].name in shared else _kept)
            for of in self._entries_of.values()
        ]

    def expect(self, reached: Collection[str], completed: Mapping[int, frozenset[str]]) -> None:
        """Expect the gradients of another graph from now on, and find out anew which parameters get none. On all ranks together.

        Args:
            reached: the parameters that the gradient of the loss may reach (`ModelGraph.reached`).
            completed: for each stage, the parameters whose gradients its last backward completes.
        """
        self._unused, self._filled = None, None
        self._completed = completed
        self._beyond = [entry for entry in self._entries if entry.name not in reached]

    def begin(self) -> None:
        """Start a step: every gradient is None, nothing is launched."""
        require_no_hooks({of[0].name: of[0].parameter for of in self._entries_of.values()}, ours=1)
        self._frozen = frozenset(entry.name for entry in self._entries if not entry.parameter.requires_grad)
        # Where forwards may go other ways, the gradient of any parameter may come: its bucket does not leave without it.
        untouched = self._untouched if self.same_way else self._frozen
        if self._weights is not None:
            self._weights.own_gradients.clear()
        for entry in self._entries:
            entry.parameter.grad = None
            entry.filled = entry.ready = False
        for bucket in self._buckets:
            bucket.require_in_place()
            bucket.missing = sum(entry.name not in untouched for entry in bucket.entries)
            bucket.pending, bucket.given_back = None, False
        for entry in self._alone:
            self._buckets[entry.bucket].missing -= entry.name not in untouched
        self._armed = frozenset()
        self._next = 0
        self._in_step = True

    @property
    def _untouched(self) -> frozenset[str]:
        """The parameters that get no gradient in this step: no forward reads them, or the user has frozen them meanwhile."""
        return (self._unused or frozenset()) | self._frozen

    def begin_last_backward(self, stage: int) -> None:
        """The backward that follows is the last one of that stage in this step."""
        self._armed = self._completed.get(stage, frozenset())

    def place(self, parameter: Tensor) -> Tensor | None:
        """Where the first gradient of a parameter in a step belongs; None: it has no place of its own."""
        entries = self._entries_of[id(parameter)]
        self._buckets[entries[0].bucket].open()
        return None if len(entries) > 1 or entries[0].staged else entries[0].view

    def added(self, parameter: Tensor) -> None:
        """To be called where something else than a backward has added to ``parameter.grad``."""
        for entry in self._entries_of[id(parameter)]:
            if entry not in self._alone:
                self._on_gradient(entry)

    def launch(self, number: int) -> None:
        """See to it that buckets up to ``number`` are launched; what is still missing in them is zero."""
        while self._next < len(self._buckets) and self._buckets[self._next].number <= number:
            self._launch_next()

    @property
    def differs(self) -> bool:
        """Whether this rank has gradients of other parameters than when the unused ones were last looked for."""
        self._look_at_alone()
        return not self.same_way and self._filled != [entry.filled for entry in self._entries]

    def wait(self, *, differs: bool = False) -> None:
        """Wait for every launched bucket. Then ``p.grad`` is the sum over the ranks, or None where no rank has a gradient.

        ``differs``: it does so on any rank, and all ranks are here for the first time in this step.
        """
        self._look_at_alone()
        for bucket in self._buckets:
            self._finish(bucket)
        self._reducing.clear()
        shared = [bucket for bucket in self._buckets if bucket.process_group is not None]
        if differs or (self.same_way and self._unused is None and all(b.pending is not None for b in shared)):
            self._unused = self._find_untouched() - (self._frozen if self.same_way else frozenset())
            self._filled = [entry.filled for entry in self._entries]
        self._in_step = False
        self._without = self._untouched | {entry.name for entry in self._beyond if not self._any_of(entry)}
        for entry in self._entries:
            if entry.name in self._without:
                entry.parameter.grad = None
                if self._weights is not None:
                    self._weights.own_gradients.pop(entry.name, None)

    def _look_at_alone(self) -> None:
        """Note which gradients there are that no hook tells of. Raises CaptureError."""
        for entry in self._alone if self._in_step else ():
            if not entry.filled and (gradient := entry.parameter.grad) is not None:
                self._require_expected(entry, gradient)
                entry.filled = True

    def _any_of(self, entry: Entry) -> bool:
        """Whether a gradient that is reduced is anything but zero, as far as this rank has it."""
        own = None if self._weights is None else self._weights.own_gradients.get(entry.name)
        found = [gradient for gradient in (own, entry.parameter.grad) if gradient is not None]
        return any(bool(gradient.any()) for gradient in found)

    @torch.no_grad()
    def gather(self, number: int) -> None:
        """Start to exchange the weights of a bucket, each rank those that it has updated; they are there after `wait_gathered`."""
        bucket = next(bucket for bucket in self._buckets if bucket.number == number)
        process_group, ranges = bucket.process_group, bucket.ranges
        assert process_group is not None  # or it is not gathered
        assert ranges is not None
        while len(self._gathering) >= BUCKETS_UNDER_WAY:  # a backend needs room for the own range besides
            self._finish_gathering()
        bucket.open()
        carried = bucket.as_weights
        for entry, (first, last), (start, stop) in bucket.own():
            carried[first:last].copy_(entry.parameter.detach().reshape(-1)[start:stop])
        started, timed = self._recorder.now(), self._recorder.on
        pending = process_group.all_gather_ranges(carried, ranges, timed=timed)
        self._recorder.collective(Action(0, "GATHER", bucket.number), started, pending)
        self._gathering.append((bucket, pending))

    def byte_sums(self, numbers: Collection[int]) -> dict[int, int]:
        """Return the sum of the bytes of the weights of these buckets, by number, as this rank has them."""
        buckets = [bucket for bucket in self._buckets if bucket.number in numbers]
        sums = [torch.stack([byte_sum(entry.parameter) for entry in bucket.entries]).sum() for bucket in buckets]
        values = torch.stack(sums).tolist() if sums else []
        return {bucket.number: value for bucket, value in zip(buckets, values, strict=True)}

    @torch.no_grad()
    def wait_gathered(self) -> None:
        """Wait for every `gather` that was started, and give the model the weights."""
        while self._gathering:
            self._finish_gathering()

    def _finish_gathering(self) -> None:
        bucket, pending = self._gathering.popleft()
        pending.wait()
        begin, carried = 0, bucket.as_weights
        for entry in bucket.entries:
            size = entry.parameter.numel()
            entry.parameter.copy_(carried[begin : begin + size].view(entry.parameter.shape))
            entry.parameter.grad = None  # what is in the buffer is none any more
            begin += size
        bucket.close()

    @torch.no_grad()
    def gather_gradients(self) -> dict[str, Tensor]:
        """The gradients of which each rank has the sums of its own range alone, by name and whole; after `wait`. Collective."""
        found: dict[str, Tensor] = {}
        apart = {} if self._weights is None else self._weights.own_gradients
        for bucket in self._buckets:
            if bucket.ranges is None or bucket.process_group is None:
                continue
            bucket.open()
            assert bucket.buffer is not None
            for entry, (first, last), _ in bucket.own():
                if entry.name in apart:
                    bucket.buffer[first:last].copy_(apart[entry.name].reshape(-1))
            bucket.process_group.all_gather_ranges(bucket.buffer, bucket.ranges).wait()
            found |= {e.name: e.view for e in bucket.entries if e.view is not None and e.name not in self._without}
            bucket.close()
        return found

    def _finish(self, bucket: FlatBucket) -> None:
        """Wait until a bucket is reduced, if it is launched."""
        if bucket.pending is None or bucket.given_back:
            return
        bucket.pending.wait()
        self._give_back(bucket)
        bucket.given_back = True  # clipping may change the gradients from here on
        if self._weights is None or bucket.ranges is None or bucket.buffer is None:
            return
        for entry, (first, last), _ in bucket.own():
            self._weights.keep_gradient(entry.name, bucket.buffer[first:last].clone())
        bucket.close()

    def _give_back(self, bucket: FlatBucket) -> None:
        """Bring the sums of boxes back to where the gradient lies."""
        for entry in bucket.entries:
            if entry.staged:
                assert entry.view is not None
                entry.of_gradient().copy_(entry.view)

    def _find_untouched(self) -> frozenset[str]:
        """The parameters that no rank has a gradient for."""
        found: set[str] = set()
        by_group: dict[ProcessGroup | None, list[Entry]] = {}
        for bucket in self._buckets:
            by_group.setdefault(bucket.process_group, []).extend(bucket.entries)
        for process_group, entries in by_group.items():
            filled = [float(entry.filled) for entry in entries]
            touched = torch.tensor(filled, device=entries[0].parameter.device)
            if process_group is not None:
                process_group.all_reduce(touched).wait()
            found |= {entry.name for entry, count in zip(entries, touched.tolist(), strict=True) if not count}
        return frozenset(found)

    def close(self) -> None:
        """Take the hooks off the user's parameters, and let their gradients go."""
        for hook in self._hooks:
            hook.remove()
        for entry in self._entries:
            entry.parameter.grad = None

    def _allocate(
        self, buckets: Sequence[tuple[Bucket, ProcessGroup | None]], parameters: Mapping[str, nn.Parameter]
    ) -> list[FlatBucket]:
        by_group: dict[ProcessGroup, list[Bucket]] = {}
        for bucket, process_group in buckets:
            for name in bucket.parameters:
                require_no_hooks({name: parameters[name]})
            if process_group is not None and len(process_group.ranks) > 1:
                by_group.setdefault(process_group, []).append(bucket)
        buffers: dict[int, Tensor] = {}
        for process_group, of in by_group.items():
            stay = [bucket for bucket in of if self._weights is None or bucket.index not in self._ranges]
            sizes = [size_of(bucket, parameters, self._boxes) for bucket in stay]
            if len(stay) < len(of):
                come = [size_of(bucket, parameters, self._boxes) for bucket in of if bucket not in stay]
                process_group.share_ranges(max(elements * dtype.itemsize for elements, dtype in come))
            if stay:
                buffers |= {
                    bucket.index: buffer for bucket, buffer in zip(stay, process_group.buffers(sizes), strict=True)
                }
        flats = []
        for place, (bucket, process_group) in enumerate(buckets):
            buffer, ranges = buffers.get(bucket.index), self._ranges.get(bucket.index)
            size = size_of(bucket, parameters, self._boxes)
            shared = process_group if process_group in by_group else None
            comes = shared is not None and buffer is None
            flat = FlatBucket(bucket.index, size, buffer, shared, comes, ranges)
            for part in bucket.parts:
                box = inside(self._boxes.get(part.name, ()), part.box)
                flat.entries.append(Entry(part.name, parameters[part.name], None, place, box))
            if buffer is not None:
                flat.attach()
            flats.append(flat)
        return flats

    def _hook(self, entries: Sequence[Entry]) -> Callable[[Tensor], None]:
        first = entries[0]
        place = self._buckets[first.bucket]

        def on_gradient(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None or not self._in_step:
                return  # a backward has come by and left nothing, and what it has for this one comes later; or it is the script's own
            if gradient is first.view and first.filled and first.name not in self._armed and place.pending is None:
                return  # one more has been added where it belongs
            for entry in entries:
                self._on_gradient(entry)

        return on_gradient

    def _on_gradient(self, entry: Entry) -> None:
        parameter, bucket = entry.parameter, self._buckets[entry.bucket]
        assert parameter.grad is not None
        in_place = entry.view is None or entry.staged or parameter.grad is entry.view
        if entry.filled and in_place and bucket.pending is None and entry.name not in self._armed:
            return
        bucket.open()
        self._require_expected(entry, parameter.grad)
        if entry.view is not None and not entry.staged and parameter.grad is not entry.view:
            entry.view.copy_(parameter.grad)
            parameter.grad = entry.view
        entry.filled = True
        if entry.name in self._armed:
            self._mark_ready(entry)
        elif bucket.pending is not None:
            raise _too_late(entry.name)

    def _require_expected(self, entry: Entry, gradient: Tensor) -> None:
        if gradient.is_sparse:
            raise CaptureError(
                f"{entry.name!r} has a sparse gradient, and gradients are reduced in flat buckets: make its embedding with sparse=False"
            )
        if self.same_way and self._unused and entry.name in self._unused:
            raise CaptureError(
                f"{entry.name!r} got a gradient, which it had not in the first step: the model goes another way from step to step, "
                "by chance, by a counter or by a choice in Python. Let it do the same in each step"
            )

    def _mark_ready(self, entry: Entry) -> None:
        bucket = self._buckets[entry.bucket]
        if entry.ready or bucket.pending is not None:
            raise _too_late(entry.name)
        entry.ready = True
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        while self._weights is not None and len(self._reducing) >= BUCKETS_UNDER_WAY:
            self._finish(self._reducing.popleft())
        bucket.open()
        for entry in bucket.entries:
            if entry.staged:
                assert entry.view is not None
                entry.view.copy_(entry.of_gradient())
            elif entry.view is not None and not entry.filled:
                entry.parameter.grad = entry.view.zero_()
        bucket.pending = self._reduce(bucket)
        self._reducing.append(bucket)
        self._next += 1

    def _reduce(self, bucket: FlatBucket) -> Work:
        if bucket.process_group is None or bucket.buffer is None:
            return Work()
        started, timed = self._recorder.now(), self._recorder.on
        if bucket.ranges is None:
            pending = bucket.process_group.all_reduce(bucket.buffer, timed=timed)
        else:
            pending = bucket.process_group.reduce_scatter_ranges(bucket.buffer, bucket.ranges, timed=timed)
        kind: ActionKind = "REDUCE_GRAD" if bucket.ranges is None else "SCATTER"
        self._recorder.collective(Action(0, kind, bucket.number), started, pending)
        return pending


def _too_late(name: str) -> CaptureError:
    return CaptureError(
        f"the gradient of {name!r} came after its bucket was reduced. Does the model use it in a part that "
        "depends on the data, or in two parts with reentrant checkpointing? Use torch.utils.checkpoint with use_reentrant=False"
    )


def _kept(_: Tensor) -> None:
    """The hook of a parameter of which this rank has the whole gradient: it says that a trainer has the parameter."""


def _on_gradient(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def require_no_hooks(parameters: Mapping[str, nn.Parameter], *, ours: int = 0) -> None:
    """Raise CaptureError for a parameter with a hook on its gradient, which would see the gradient of one micro-batch on one device.

    Args:
        ours: how many hooks of this library each parameter has.
    """
    for name, parameter in parameters.items():
        later = (parameter._post_accumulate_grad_hooks or {}).values()
        if not ours and any(getattr(hook, "__module__", "") == __name__ for hook in later):
            raise CaptureError(
                f"the model is still under another plan, which collects the gradient of {name!r}: close() the trainer that was made of it "
                "before, or leave its 'with'"
            )
        if parameter._backward_hooks or len(later) > ours:
            raise CaptureError(refusal_of_hook(name))


def refusal_of_hook(name: str) -> str:
    """Return what to say of a hook on the gradient of that parameter."""
    return (
        f"{name!r} has a hook on its gradient, which would see the gradients of parts of the batch in place of the whole. Remove it: "
        "gradients are clipped by clip_grad_norm, and what shall not be trained can be a buffer, or be masked in forward"
    )
