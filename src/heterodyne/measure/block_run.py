"""One forward and backward of a block, as it runs inside training: gradients accumulate, inputs are fresh.

The backward may come in two halves, as in schedules without bubbles: the gradients of the inputs, then those of the weights. Where
training replaces functions of torch (masks of dropout that belong to the samples), so does a block that is timed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heterodyne.eager import run_eager
from heterodyne.measure.clock import Mark, Stopwatch
from heterodyne.plan.precision import Precision
from heterodyne.processes.heap import forget_high_water_mark, high_water_mark_bytes, trim_heap

__all__ = ["BlockProgram", "BlockRun", "Halves", "Precision", "Surroundings", "bytes_kept"]


class BlockProgram(Protocol):
    """A block, or a whole model, that can be built anywhere at any micro-batch size."""

    def instantiate(self, batch: int, device: torch.device, *, seed: int = 0) -> tuple[nn.Module, Sequence[object]]:
        """A module with weights on ``device``, and inputs for ``module(*inputs)``; those that need a gradient require it."""
        ...


class Halves(Protocol):
    """Active during a forward, it lets the backward leave out the gradients of the weights, which `run` makes afterwards."""

    def __enter__(self) -> object: ...
    def __exit__(self, *exception: Any) -> object: ...
    def run(self) -> None: ...


class Surroundings(Protocol):
    """What training puts around the passes of a micro-batch of so many samples."""

    def forward(self, samples: int) -> AbstractContextManager[object]: ...
    def backward(self, samples: int) -> AbstractContextManager[object]:
        """Return what surrounds the backward of the latest forward."""
        ...


class BlockRun:
    """Runs a block again and again; each call returns the marks before forward, after it, before backward and after it."""

    def __init__(
        self,
        program: BlockProgram,
        size: int,
        device: torch.device,
        *,
        precision: Precision,
        seed: int,
        clock: Stopwatch,
        compile: Callable[[nn.Module], None] | None = None,
        around: Surroundings | None = None,
    ) -> None:
        self._module, inputs = program.instantiate(size, device, seed=seed)
        self._inputs = tuple(inputs)
        self._size = size
        self._around = around
        self._device = device
        self._precision = precision
        self._generator = torch.Generator(device).manual_seed(seed)
        self._clock = clock
        self._cotangents: list[torch.Tensor] | None = None
        if compile is not None:
            compile(self._module)
            self()  # here it is compiled, which is no part of any time

    def __call__(self) -> tuple[Mark, ...]:
        return self._run(nullcontext())

    def halved(self, halves: Callable[[], Halves]) -> tuple[Mark, ...]:
        """The same with a backward in halves, and one mark more, after the second."""
        deferred = halves()
        marks = self._run(deferred)
        deferred.run()
        return *marks, self._clock.mark()

    def _run(self, around_forward: Halves | AbstractContextManager[Any]) -> tuple[Mark, ...]:
        inputs = self._fresh()
        start = self._clock.mark()
        with around_forward:
            outputs = self._forward(inputs)
        middle = self._clock.mark()
        differentiable = list(_differentiable(outputs))
        cotangents = self._cotangents_of(differentiable)
        begin = self._clock.mark()
        if differentiable:
            with nullcontext() if self._around is None else self._around.backward(self._size):
                torch.autograd.backward(differentiable, cotangents)
        end = self._clock.mark()
        self._forget_input_gradients()
        return start, middle, begin, end

    def memory(self) -> tuple[tuple[int, int], int, float]:
        """Bytes kept from forward to backward (see `bytes_kept`), the peak beyond weights and gradients (0 where nobody counts), seconds
        of a run.

        Afterwards the block has run, and its gradients exist.
        """
        weights = [*self._module.parameters(), *self._module.buffers()]
        kept = bytes_kept(lambda: self._forward(self._fresh()), weights)
        marks = self()
        if self._device.type == "cpu":
            return kept, self._resident_peak(), self._seconds(marks)
        torch.accelerator.synchronize(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        before = torch.accelerator.memory_allocated(self._device)
        marks = self()
        torch.accelerator.synchronize(self._device)
        peak = max(0, torch.accelerator.max_memory_allocated(self._device) - before)
        return kept, peak, self._seconds(marks)

    def _resident_peak(self) -> int:
        """By how much a run raises the highest resident size of this process: with the pages that the C heap touches between tensors.

        What is free in the heap goes back before, or it would be used again and not be seen.
        """
        trim_heap()
        if not forget_high_water_mark():
            return 0
        before = high_water_mark_bytes()
        self()
        after = high_water_mark_bytes()
        return 0 if before is None or after is None else max(0, after - before)

    def let_go(self) -> None:
        """It will not run again: weights and gradients go now. A module refers to itself in circles, and would keep them for a while."""
        for part in self._module.modules():
            for table in (part._parameters, part._buffers):
                table.update(dict.fromkeys(table))

    def _seconds(self, marks: tuple[Mark, ...]) -> float:
        return self._clock.seconds(marks[0], marks[-1])

    def _forward(self, inputs: tuple[object, ...]) -> object:
        around = nullcontext() if self._around is None else self._around.forward(self._size)
        with _autocast(self._device, self._precision), around:
            return self._module(*inputs)

    def _fresh(self) -> tuple[object, ...]:
        """Copies of the inputs: a block may write into them, which a leaf that requires a gradient does not allow."""
        return tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in self._inputs)

    def _forget_input_gradients(self) -> None:
        """Inside a model, the gradient of a block's input is passed on and not added up."""
        for x in self._inputs:
            if isinstance(x, torch.Tensor):
                x.grad = None

    def _cotangents_of(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._cotangents is None:
            self._cotangents = [
                torch.ones_like(y) if y.dim() == 0 else torch.empty_like(y).normal_(generator=self._generator)
                for y in outputs
            ]
        return self._cotangents


def _differentiable(outputs: object) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            yield leaf


def _autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def bytes_kept(forward: Callable[[], object], weights: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Bytes of the distinct storages that ``forward`` saves for its backward, without those of the weights; and of those, apart, that are
    narrow copies of weights, which autocast makes: each forward makes its own, but they do not grow with the batch.
    """
    weights = list(weights)
    copies, own = _Copies(weights), {weight.untyped_storage().data_ptr() for weight in weights}
    kept: dict[int, torch.UntypedStorage] = {}  # holds the storages, so that no address comes to mean two of them

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage)
        return tensor.detach()  # an output that its own op keeps, with its graph, would hold itself for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), copies, run_eager():
        forward()
    copied = sum(storage.nbytes() for place, storage in kept.items() if place in copies.storages and place not in own)
    return sum(storage.nbytes() for place, storage in kept.items() if place not in copies.storages), copied


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the weights through changes of dtype."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {w.untyped_storage().data_ptr(): w.untyped_storage() for w in weights}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage().data_ptr() in self.storages:
            copy = result.untyped_storage()
            self.storages[copy.data_ptr()] = copy
        return result
