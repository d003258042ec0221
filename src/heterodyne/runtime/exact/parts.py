"""Do the parts of a batch add up to the whole? Asked of the module itself, on real samples, before anything is planned.

`run_in_parts` runs forward and backward of a module on a batch, and again on unequal parts of it. With the loss counted right, and
samples that do not see each other, the weighted losses and gradients of the parts are those of the whole (`exact.weighting`). A wrong
count, a choice in Python that is made for all samples of a batch, a norm over the samples, a hook that is not linear: none of
them passes. It also sees what only a graph tells otherwise: random draws, BatchNorm, buffers that forward changes.

What a model does with other samples than these, nobody can know. So the batch should be a real one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from heterodyne.eager import run_eager
from heterodyne.errors import CaptureError, HeterodyneError
from heterodyne.graph.ir import ModelGraph
from heterodyne.loss_count import LossCount
from heterodyne.runtime.exact.dropout import draws_call_number
from heterodyne.runtime.exact.interception import BatchNormCall, Interception, batch_norms
from heterodyne.runtime.exact.same_again import changed_names, kept_tensors, words_of_second_call
from heterodyne.runtime.exact.verify import GradientErrors, compare, gradients_after, rounding_bar
from heterodyne.runtime.exact.weighting import sum_of_parts
from heterodyne.runtime.slices import BatchSource
from heterodyne.runtime.stages.forward import Forward, Precision
from heterodyne.runtime.weights.trainable import trainable_parameters

__all__ = ["MOST_SAMPLES", "Seen", "nothing_from_python", "run_in_parts"]

MOST_SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a forward did. ``random``: it drew random numbers; ``batch_norm``: it took statistics over the samples."""

    random: bool
    batch_norm: bool


def run_in_parts(
    module: nn.Module,
    source: BatchSource,
    *,
    graph: ModelGraph,
    loss_count: LossCount,
    device: torch.device,
    precision: Precision = "fp32",
) -> Seen:
    """Compare the module on up to 8 samples with itself on parts of them, each sample alone among these.

    Args:
        module: a copy of the user's, on the device, with weights, in the mode in which it is trained. It may be changed.
        graph: how the loss is averaged, and which parameters are trained.

    Raises CaptureError if the parts do not add up, with both losses; if forward changes a buffer (but those of BatchNorm), draws random
    numbers that cannot belong to the samples, or reaches BatchNorm in some parts only; and if the module fails.
    """
    samples = min(source.size, MOST_SAMPLES)
    if samples < 2:
        raise CaptureError(
            "the example batch has one sample, and shows nothing about the parts of a batch: take two or more"
        )
    run = _Run(module, source, graph=graph, loss_count=loss_count, device=device, precision=precision)
    whole = run.on([samples])
    run.require_same_again(whole, samples)
    for sizes in _partitions(samples):
        run.require_equal(whole, run.on(sizes), sizes)
    return run.seen()


@dataclass(frozen=True, kw_only=True)
class _Result:
    """Over all parts: the weighted loss, the gradients; and of each part its loss."""

    loss: float
    gradients: Mapping[str, Tensor]
    losses: Sequence[float]


class _Run:
    def __init__(
        self,
        module: nn.Module,
        source: BatchSource,
        *,
        graph: ModelGraph,
        loss_count: LossCount,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self._module = module
        self._source = source
        self._graph = graph
        self._count = loss_count
        self._parameters = trainable_parameters(module, graph)
        self._forward = Forward(module, graph, device=device, precision=precision, seed=0)
        self._bar = rounding_bar(device, precision)
        self._watch = _RandomOps()
        self._calls: list[tuple[object, ...]] = []
        _require_no_sync_batch_norm(module)

    def seen(self) -> Seen:
        dropout = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0 for m in self._all())
        normed = any(self._calls)
        if not normed and any(_takes_statistics(m) for m in self._all()):
            raise _sometimes_normed()
        return Seen(random=self._watch.drew or dropout, batch_norm=normed)

    def on(self, sizes: Sequence[int]) -> _Result:
        """Forward and backward of parts of these sizes, one after the other."""
        spans = pairwise(accumulate(sizes, initial=0))
        parts = [(range(first, last), self._source.samples(first, last - first)) for first, last in spans]
        buffers = dict(self._module.named_buffers())
        summed, gradients = gradients_after(
            lambda: sum_of_parts(self._count, parts, buffers, self._backward), self._parameters
        )
        if summed is None:
            raise CaptureError(
                "nothing in the example batch counts by loss_count, so its loss tells nothing: take another"
            )
        loss, losses = summed
        return _Result(loss=loss, gradients=gradients, losses=losses)

    def _backward(self, part: Mapping[str, Tensor], samples: Sequence[int], weight: float) -> float:
        draws = self._forward.draws(0, samples)
        norms = _FixedBatchNorm()
        with self._unchanged(), nothing_from_python(), self._watch, norms, run_eager():
            loss = self._forward.loss(part, draws)
            self._calls.append(tuple(norms.calls))
            if norms.calls and norms.took_gradient:
                raise CaptureError(
                    "forward takes a gradient (torch.autograd.grad) and has BatchNorm in training: through the statistics of the whole "
                    "batch that gradient reads the samples of all devices, which would have to meet in the middle of it. Put BatchNorm in "
                    "eval mode, or take LayerNorm or GroupNorm"
                )
            if len(set(self._calls)) > 1:
                raise _sometimes_normed()
            self._forward.backward(loss, weight, draws)
        return loss.item()

    def require_same_again(self, whole: _Result, samples: int) -> None:
        before = kept_tensors(self._module)
        again = self.on([samples])
        if not compare(again.loss, again.gradients, whole.loss, whole.gradients).largest <= self._bar:
            names = changed_names(before, kept_tensors(self._module))
            raise CaptureError(words_of_second_call(self._graph.name, first=whole.loss, again=again.loss, names=names))

    def require_equal(self, whole: _Result, parts: _Result, sizes: Sequence[int]) -> None:
        found = compare(parts.loss, parts.gradients, whole.loss, whole.gradients)
        if found.largest <= self._bar:
            return
        raise CaptureError(
            f"the parts of a batch do not add up to the whole ({sum(sizes)} samples as parts of {' + '.join(map(str, sizes))}): "
            f"{_difference(found, self._bar, whole, parts)}. {self._remedy(whole, parts, sizes)}"
        )

    def _remedy(self, whole: _Result, parts: _Result, sizes: Sequence[int]) -> str:
        by_samples = sum(size * loss for size, loss in zip(sizes, parts.losses, strict=True)) / sum(sizes)
        said = "sum" if self._graph.loss.reduction == "sum" else self._graph.loss.count
        for name, value in (("sum", sum(parts.losses)), ("samples", by_samples)):
            if name != said and abs(value - whole.loss) <= self._bar * abs(whole.loss):
                return f"The losses add up with loss_count={name!r}: is it that?"
        return (
            "Either loss_count is not what the loss divides by, or the samples see each other: a choice in Python that is made once for a "
            "whole batch, a norm or a maximum over the samples. Each device has only its own samples, so let each sample go its own way"
        )

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Raises CaptureError if a buffer or a parameter is another one after."""
        norms = {id(b) for m in self._all() if isinstance(m, nn.modules.batchnorm._BatchNorm) for b in m.buffers()}
        kept = [*self._module.named_buffers(), *self._module.named_parameters()]
        before = [(name, tensor, tensor.detach().clone()) for name, tensor in kept if id(tensor) not in norms]
        yield
        now = dict([*self._module.named_buffers(), *self._module.named_parameters()])
        for name, buffer, value in before:
            if now.get(name) is not buffer or not torch.equal(buffer, value):
                raise CaptureError(
                    f"forward changes {name!r}, which the model keeps for the next forward. Each device sees only its own samples, so the "
                    "copies would drift apart: change it outside of forward, once a step. BatchNorm is the one exception that is known"
                )

    def _all(self) -> list[nn.Module]:
        return list(self._module.modules())


def _partitions(samples: int) -> list[list[int]]:
    """One and the rest; and each sample alone, which tells most of what a batch does to them."""
    return [[1, samples - 1]] + ([[1] * samples] if samples > 2 else [])


class _FixedBatchNorm(Interception):
    """While active, BatchNorm in training normalises with mean 0 and variance 1, so that samples do not see each other in it; the
    runtime serves it (`exact.batch_norm`). ``calls``: what was called; ``took_gradient``: torch.autograd.grad was, too.
    """

    def __init__(self) -> None:
        super().__init__({**batch_norms(self._batch_norm), torch.autograd.grad: self._gradient})
        self.calls: list[object] = []
        self.took_gradient = False

    def _gradient(self, *args: Any, **options: Any) -> Any:
        self.took_gradient = True
        return torch.autograd.grad(*args, **options)

    def _batch_norm(self, call: BatchNormCall) -> Tensor:
        channels = call.input.shape[1]
        self.calls.append((channels, id(call.running_mean)))
        mean = torch.zeros(channels, dtype=torch.float32, device=call.input.device)
        return F.batch_norm(call.input, mean, torch.ones_like(mean), call.weight, call.bias, False, 0.0, call.eps)


class _RandomOps(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not say
    """Sees every operator. ``drew``: whether any drew random numbers that belong to the samples (`SampleDropout`).

    Raises HeterodyneError for one whose numbers cannot.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.drew = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if draws_call_number(func, args):
            self.drew = True
        elif _draws(func, args, kwargs):
            raise HeterodyneError(
                f"{func} draws random numbers that cannot be made to belong to the samples, so they would depend on the plan. Draw with "
                "torch.rand, randn, bernoulli or dropout, or switch it off"
            )
        return func(*args, **kwargs)


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    values = {entry.name: value for entry, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    if values.get("train") is False or values.get("training") is False:
        return False
    return all(values.get(name) not in (0, 0.0) for name in ("p", "dropout_p", "dropout"))


@contextmanager
def nothing_from_python() -> Iterator[None]:
    """Raises CaptureError if random numbers were drawn inside that are not torch's."""
    before = random.getstate(), _numpy_state()
    yield
    if (random.getstate(), _numpy_state()) != before:
        raise CaptureError(
            "forward draws random numbers from Python's random or from numpy, which differ from device to device and depend on the plan: "
            "draw them for each sample with torch.rand(samples, ...), or in the data"
        )


def _numpy_state() -> object:
    name, keys, *rest = np.random.get_state(legacy=True)  # the one that models draw from
    return name, np.asarray(keys).tobytes(), *rest


def _takes_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training


def _sometimes_normed() -> CaptureError:
    return CaptureError(
        "BatchNorm is reached with some samples and not with others, or not at all. Its statistics are taken over the samples of all "
        "devices, so every device has to reach it in every micro-batch: move it out of the branch, or put it in eval mode"
    )


def _require_no_sync_batch_norm(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise CaptureError(
                f"{name!r} is a SyncBatchNorm, which communicates with the other ranks, whatever samples they have. Write BatchNorm: its "
                "statistics are taken over all devices"
            )


def _difference(found: GradientErrors, bar: float, whole: _Result, parts: _Result) -> str:
    if not found.loss <= bar:
        return f"the loss of the whole is {whole.loss:.7g}, that of the parts together {parts.loss:.7g}"
    name, error = found.gradients[0]
    return f"the gradients of {name!r} differ by {error:.2g} times their norm"
