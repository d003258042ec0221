"""The user's model on one slice of the batch, with results that do not depend on how the batch was cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from heterodyne.eager import run_eager
from heterodyne.graph.draws import require_samples_own_draws
from heterodyne.graph.ir import ModelGraph
from heterodyne.model_output import loss_of
from heterodyne.plan.precision import Precision
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.exact.batch_norm import GlobalBatchNorm
from heterodyne.runtime.exact.dropout import Draws, SampleDropout
from heterodyne.runtime.exact.generators import require_known_draws

__all__ = ["Forward", "Precision", "autocast", "on_device"]

_NOTHING = nullcontext()
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """What a forward in that precision runs under; nothing in fp32."""
    dtype = _AUTOCAST[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


class Forward:
    """Runs forward and backward of one micro-batch, in the model's own mode (train or eval).

    Args:
        module: called as ``module(**inputs)``; returns its loss as a scalar, ``.loss``, ``["loss"]`` or the first of a tuple.
        graph: says whether the model draws random numbers or mixes samples; only then is anything intercepted.
        first_sample: see `SampleDropout`.
        statistics: joins the ranks that have samples; None: this rank alone.

    Raises CaptureError if a random op's draws cannot be made to belong to the samples.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: ModelGraph,
        *,
        device: torch.device,
        precision: Precision,
        seed: int,
        first_sample: int = 0,
        statistics: ProcessGroup | None = None,
    ) -> None:
        self._module = module
        self._device = device
        self._precision = precision
        self._dropout = SampleDropout(seed=seed, device=device, first_sample=first_sample) if graph.random else None
        self._counts_batches = bool(graph.batch_statistics)
        several = statistics is not None and len(statistics.ranks) > 1
        self._batch_norm = GlobalBatchNorm(statistics) if statistics and several and graph.batch_statistics else None
        self._opaque = graph.opaque is not None
        require_samples_own_draws(graph)

    def draws(self, step: int, samples: Sequence[int], first_call: int = 0) -> Draws | None:
        """The masks for the samples with these places in the global batch, in a part of the model before which there are
        ``first_call`` calls that draw.
        """
        return self._dropout.draws(step, samples, first_call) if self._dropout else None

    def around_forward(self, draws: Draws | None) -> AbstractContextManager[None]:
        """What has to surround the forward of any part of the model. ``draws`` None: random ops are left to torch."""
        if self._precision == "fp32" and not (self.intercepts or self._opaque):
            return _NOTHING
        return self._in_forward(draws)

    @contextmanager
    def _in_forward(self, draws: Draws | None) -> Iterator[None]:
        with self._autocast(), self._modes(draws, "forward"), self._known_draws(draws):
            yield

    @contextmanager
    def around_recompute(self, draws: Draws | None) -> Iterator[None]:
        """The same for a part that is run once more; torch's generator is left as it is, and the statistics of BatchNorm count once."""
        with self._autocast(), self._modes(draws, "backward"), self._unchanged_buffers():
            yield

    def around_backward(self, draws: Draws | None) -> AbstractContextManager[None]:
        """What has to surround a backward. Use `torch.autograd.backward` in it: inside of ``loss.backward`` a function mode is
        not active (see `interception`).
        """
        return self._modes(draws, "backward") if self.intercepts else _NOTHING

    @property
    def intercepts(self) -> bool:
        """Whether functions of torch are replaced while the model runs, which code that is compiled would not notice."""
        return self._dropout is not None or self._batch_norm is not None

    @property
    def mixes_samples(self) -> bool:
        """Whether the samples of other ranks depend on those of this one."""
        return self._batch_norm is not None

    def weights(self) -> frozenset[int]:
        """Addresses of the memory of parameters and buffers, as it is now."""
        stored = (*self._module.parameters(), *self._module.buffers())
        return frozenset(t.untyped_storage().data_ptr() for t in stored if not t.is_meta)

    def loss(self, inputs: Mapping[str, Tensor], draws: Draws | None = None) -> Tensor:
        """The loss of a slice, on the device, with its graph. ``draws`` None: random ops are left to torch."""
        inputs = on_device(inputs, self._device)
        with self.around_forward(draws):
            return loss_of(self._module(**inputs))

    def backward(self, loss: Tensor, weight: float, draws: Draws | None) -> None:
        """Add ``weight`` times the gradient of the loss to the gradients of the parameters.

        A micro-batch of weight 0 has none (its mean loss may not even be a number), unless its samples are part of the statistics
        that other ranks' losses depend on.
        """
        if not loss.requires_grad or (weight == 0 and self._batch_norm is None):
            return  # a model without a graph may take a branch in which these samples meet no weight
        with self.around_backward(draws):
            torch.autograd.backward(loss, torch.full_like(loss, weight))

    @contextmanager
    def _modes(self, draws: Draws | None, part: Literal["forward", "backward"]) -> Iterator[None]:
        with ExitStack() as stack:
            if self.intercepts:
                stack.enter_context(run_eager())
            if self._batch_norm is not None:
                if part == "forward" and torch.is_grad_enabled():  # ranks may evaluate more or fewer parts than others
                    self._batch_norm.begin_forward()
                stack.enter_context(self._batch_norm)
            if self._dropout is not None and draws is not None:
                of_part = self._dropout.forward if part == "forward" else self._dropout.backward
                stack.enter_context(of_part(draws))
            yield

    @contextmanager
    def _unchanged_buffers(self) -> Iterator[None]:
        kept = [(b, b.detach().clone()) for b in self._module.buffers() if self._counts_batches and not b.is_meta]
        yield
        for buffer, value in kept:
            buffer.data.copy_(
                value
            )  # as data: other micro-batches have noted the version of the buffer for their backward

    def _known_draws(self, draws: Draws | None) -> AbstractContextManager[None]:
        if not self._opaque or not torch.is_grad_enabled():
            return nullcontext()
        calls = draws.calls if draws is not None else {}
        return require_known_draws(self._device, lambda: len(calls))

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self._device, self._precision)


def on_device(inputs: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The inputs on a device. An accelerator copies them from pinned memory, while the host goes on."""
    if all(tensor.device == device for tensor in inputs.values()):
        return dict(inputs)
    pinned = device.type not in ("cpu", "mps")  # Apple's devices share the host's memory
    return {
        name: (tensor.pin_memory() if pinned and tensor.device.type == "cpu" else tensor).to(device, non_blocking=True)
        for name, tensor in inputs.items()
    }
