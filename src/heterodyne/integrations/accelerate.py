"""A loop written for Accelerate, under a plan: ``prepare``, ``model(**batch)``, ``accelerator.backward(loss)``. See docs/trainer.md.

    from heterodyne.integrations.accelerate import Accelerator

In train mode the model returns a promise of its loss, and ``backward`` runs the whole step on the batch: with unequal shares the loss
of the global batch is known only then. ``optimizer.step()`` finds no gradients and does nothing, and a loop that reads a gradient gets an
error so. Accelerate itself is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heterodyne.api import Distributed, distribute
from heterodyne.api.loop.remade_optimizer import follow, remade
from heterodyne.api.session import LONGEST_PHASE_S
from heterodyne.errors import HeterodyneError
from heterodyne.integrations.first_batch import first_batch
from heterodyne.runtime.weights.masters import gradient_dtype
from heterodyne.runtime.weights.parameter_groups import options_of

__all__ = ["Accelerator", "PreparedModel", "Promise"]


class Promise:
    """The loss of a batch, or the outputs that hold it, until ``backward`` has run the step; then ``item`` and ``float`` give it."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        self.batch = batch
        self.value: float | None = None

    @property
    def loss(self) -> Self:
        return self

    def item(self) -> float:
        """Raises HeterodyneError before the step."""
        if self.value is None:
            raise HeterodyneError(
                "the loss is known when accelerator.backward(loss) has run the step: read it after that"
            )
        return self.value

    def detach(self) -> Tensor:
        return torch.tensor(self.item())

    def __float__(self) -> float:
        return self.item()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"reads .{name} of the outputs")

    def _combined(self, *_: object) -> NoReturn:
        _refuse("computes with the loss")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __getitem__ = _combined

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], *_: object) -> NoReturn:
        _refuse(f"calls {getattr(function, '__name__', 'a function')} on the outputs")


class PreparedModel:
    """The user's model: in train mode a call returns a `Promise`, in eval mode the outputs for the whole batch, with the loss."""

    def __init__(self, distributed: Distributed) -> None:
        self._distributed = distributed

    def __call__(self, **batch: Tensor) -> Any:
        if self._distributed.module.training:
            return Promise(batch)
        outputs = self._distributed.predict(batch)
        if "labels" in batch and hasattr(outputs, "loss"):
            outputs["loss"] = torch.tensor(self._distributed.evaluate(batch))
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._distributed.module, name)


class Accelerator:
    """What such loops call; the ranks are those of a torchrun, or of our launcher.

    Args:
        mixed_precision: ``no`` or ``bf16``.
        clip_grad_norm: for ``clip_grad_norm_``, which the step must know of beforehand.
        distribution: more arguments of `hd.distribute`.
    """

    def __init__(self, *, mixed_precision: str = "no", clip_grad_norm: float = 0.0, **distribution: Any) -> None:
        self._precision = "fp32" if mixed_precision == "no" else mixed_precision
        self._clip = clip_grad_norm
        self._distribution = distribution
        self._optimizer: Optimizer | None = None
        self._waits = False  # backward has been called, and optimizer.step() has not
        self._followed: list[dict[str, Any]] = []  # options of the groups in the step
        self._norm: float | None = None
        self.distributed: Distributed | None = None

    def prepare(self, model: nn.Module, optimizer: Optimizer, loader: Iterable[Any], *others: Any) -> tuple[Any, ...]:
        """Return the model under its plan, and the rest as it is.

        Each batch of the loader is a global one, the same on every rank (Accelerate's ``split_batches=True``). The first is looked at, and
        still comes first in the loop; see `first_batch`. The optimizer keeps rates and options, for schedulers; its state is kept by
        ``save_state``.

        Raises HeterodyneError for an optimizer that cannot be made of a part of the parameters.
        """
        if self.distributed is not None:
            raise HeterodyneError("prepare was called before: one accelerator trains one model")
        self._optimizer = optimizer
        batch, loader = first_batch(loader)
        self.distributed = distribute(
            model,
            batch,
            **{
                "optimizer": remade(optimizer, model),
                "precision": self._precision,
                "clip_grad_norm": self._clip,
                **self._distribution,
            },
        )
        if self.distributed.steps_done:
            self._take_options()
        if hasattr(optimizer, "register_step_pre_hook"):
            optimizer.register_step_pre_hook(self._on_step)
            optimizer.register_step_post_hook(
                lambda *_: _mark_spent(self._trained())
            )  # until zero_grad, as gradients would be there
        return PreparedModel(self.distributed), optimizer, loader, *others

    def _on_step(self, script: Optimizer, *_: object) -> None:
        """Raises HeterodyneError if rates or options have been changed since the update, which they were meant for."""
        self._waits = False
        _take_away_spent(self._trained())
        if self._followed and list(map(options_of, script.param_groups)) != self._followed:
            raise HeterodyneError(
                "rates or options of the optimizer were changed between accelerator.backward(loss), which runs the whole step, and "
                "optimizer.step(): change them before backward"
            )

    def _take_options(self) -> None:
        """Give the optimizer of the script the rates and options of a checkpoint, also of groups that are elsewhere. Collective."""
        for group, options in zip(
            cast(Optimizer, self._optimizer).param_groups, self._prepared().group_options(), strict=True
        ):
            group.update(options)

    def backward(self, loss: Promise) -> None:
        """The whole step on the batch of the loss: forward, backward, clipping, update."""
        if not isinstance(loss, Promise):
            _refuse("calls backward with another loss than the model's own")
        if loss.value is not None:
            raise HeterodyneError("backward was called with this loss before")
        distributed = self._prepared()
        script = cast(Optimizer, self._optimizer)
        if self._waits:
            raise HeterodyneError(
                "backward was called twice without optimizer.step() between, and each backward here is a whole step: gradients of several "
                "batches are not accumulated. Let the loader give batches as large as all of them together; their micro-batches are chosen "
                "by the plan"
            )
        self._waits = hasattr(script, "register_step_pre_hook")
        follow(distributed.optimizer, script)
        self._followed = list(map(options_of, script.param_groups))
        result = distributed.step(loss.batch)
        loss.value, self._norm = result.loss, result.grad_norm
        distributed.module.zero_grad()
        if self._waits:
            _mark_spent(self._trained())

    def clip_grad_norm_(self, parameters: object, max_norm: float) -> float | None:
        """The norm before the step's clipping. Raises HeterodyneError if the accelerator does not know of it."""
        if max_norm != self._clip:
            raise HeterodyneError(f"the step has clipped at {self._clip}: write Accelerator(clip_grad_norm={max_norm})")
        return self._norm

    def clip_grad_value_(self, parameters: object, clip_value: float) -> NoReturn:
        """Raise HeterodyneError: the update is made already."""
        raise HeterodyneError(
            f"the loop clips gradients by value, at {clip_value:g}, after accelerator.backward(loss), which has made the update already. "
            "Clip by norm, Accelerator(clip_grad_norm=...), or clamp them in step() of an optimizer of your own"
        )

    def gather_for_metrics(self, values: Any) -> Any:
        """As they are: outputs in eval mode are those of the whole batch on every rank."""
        return values

    gather = gather_for_metrics

    @property
    def is_main_process(self) -> bool:
        return self._prepared().rank == 0

    def print(self, *words: object) -> None:
        if self.is_main_process:
            print(*words)  # noqa: T201  # it is what the user asked for

    def save_state(self, directory: Path | str, **extra: Any) -> Path:
        """Weights, optimizer and ``extra`` (the state of a scheduler). Collective."""
        return self._prepared().save_checkpoint(directory, extra=extra)

    def load_state(self, directory: Path | str) -> dict[str, Any] | None:
        """The inverse, also under another plan; what was ``extra``, None without any checkpoint. The optimizer has the rates and options
        of then, so load a scheduler's state after it. Collective.
        """
        extra = self._prepared().load_checkpoint(directory)
        if extra is not None:
            self._take_options()
        return extra

    def save_model(self, model: object, directory: Path | str) -> Path:
        """The weights as `Distributed.save_pretrained`. Collective."""
        return self._prepared().save_pretrained(directory)

    def phase(self, words: str, limit_s: float = LONGEST_PHASE_S) -> AbstractContextManager[Any]:
        """Around long work of one rank, as `Distributed.phase`."""
        return self._prepared().phase(words, limit_s)

    def end_training(self) -> None:
        """The weights are back in the model. Collective."""
        _take_away_spent(self._trained())
        self._prepared().close()

    def _trained(self) -> Iterator[Tensor]:
        """The parameters that a loop can read gradients of; under a plan that cuts the model those of the optimizer are others."""
        yield from self._prepared().module.parameters()
        for group in cast(Optimizer, self._optimizer).param_groups:
            yield from group["params"]

    def _prepared(self) -> Distributed:
        if self.distributed is None:
            raise HeterodyneError("nothing is prepared yet: call prepare(model, optimizer, loader) first")
        return self.distributed


def _refuse(what: str) -> NoReturn:
    raise HeterodyneError(
        f"the loop {what}, and the step is not run before accelerator.backward(loss) with the model's own loss: let forward return the "
        "whole loss, or use hd.distribute(model, batch, loss=...) and trainer.step(batch)"
    )


_AS_THEY_ARE = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "grad_fn",
        "requires_grad",
        "is_sparse",
        "is_meta",
        "is_cpu",
        "is_cuda",
    )
)
# Of zero_grad(set_to_none=False), which is as good before the next step.
_CLEARING = frozenset({Tensor.zero_, Tensor.detach_, Tensor.requires_grad_, torch._foreach_zero_})


class _SpentGradient(Tensor):
    """Raises HeterodyneError for all that is done with it, but to clear it or to ask of what shape it is."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _CLEARING:
            return args[0]
        if function in _AS_THEY_ARE:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise HeterodyneError(
            f"the loop calls {getattr(function, '__name__', 'a function')} on a gradient after accelerator.backward(loss), which has made "
            "the update already, from gradients that are on several ranks. Clip by Accelerator(clip_grad_norm=...), whose clip_grad_norm_ "
            "gives the norm; what is done to each value of a gradient, such as clamp, write into step() of an optimizer of your own"
        )


def _mark_spent(parameters: Iterable[Tensor]) -> None:
    """Put one in place of the gradient of each parameter that is trained."""
    with torch._C.DisableTorchFunctionSubclass():  # also where not every rank holds it, and uses of it are refused
        for parameter in parameters:
            if parameter.requires_grad:
                value = torch.empty((), dtype=gradient_dtype(parameter), device=parameter.device)
                parameter.grad = value.expand(parameter.shape).as_subclass(_SpentGradient)


def _take_away_spent(parameters: Iterable[Tensor]) -> None:
    """Leave no gradient where one was marked."""
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            if isinstance(parameter.grad, _SpentGradient):
                parameter.grad = None
