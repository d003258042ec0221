"""A loss that stands outside of the model, and the model, as one module that returns the loss.

The conventions, which are those of loops in PyTorch:

    a tuple (x, y), or (x1, x2, y)   loss(model(x), y): the last tensor is the target
    a mapping                        loss(model(**entries), batch): the model gets the entries that its forward names, the loss all of them
    a tensor x                       loss(model(x), x)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import is_not
from types import FunctionType
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from heterodyne.api.loop.batches import BatchFormat
from heterodyne.errors import CaptureError
from heterodyne.runtime.checkpoint.state_names import LOSS, StateNames

__all__ = ["LossFunction", "ModelWithLoss", "names_of", "with_loss"]

LossFunction: TypeAlias = Callable[..., Tensor]


class ModelWithLoss(nn.Module):
    """Called with a batch by name, it returns the loss.

    Args:
        model, loss_fn: the user's.
        inputs: which entries of the batch the model is called with.
        positional: in this order, not by keyword.
        target: the entry that the loss gets besides the output; None: it gets all of the batch.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, *, inputs: Sequence[str], positional: bool, target: str | None
    ) -> None:
        super().__init__()
        self.model: nn.Module = model
        self.loss_fn = _named_forward(loss_fn)
        self._given = loss_fn, _parts(loss_fn)
        self.training = model.training
        self._inputs = tuple(inputs)
        self._positional = positional
        self._target = target

    def renew(self) -> None:
        """Take over code and defaults of the loss function, if the script has put others in their place."""
        given, known = self._given
        parts = _parts(given)
        if any(map(is_not, parts, known)):
            self.loss_fn, self._given = _named_forward(given), (given, parts)

    def forward(self, **batch: Tensor) -> Tensor:
        args, kwargs = self.arguments(batch)
        output = self.model(*args, **kwargs)
        return self.loss_fn(output, batch if self._target is None else batch[self._target])

    def arguments(self, batch: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return what the model is called with; what only the loss reads may be missing in the batch."""
        given = {name: batch[name] for name in self._inputs if name in batch}
        return (tuple(given.values()), {}) if self._positional else ((), given)


def names_of(module: nn.Module) -> StateNames:
    """Return the names of states of a captured module."""
    if not isinstance(module, ModelWithLoss):
        return StateNames(wrapped=False)
    return StateNames(wrapped=True, loss=_has_state(module.loss_fn))


def with_loss(
    model: nn.Module,
    loss: LossFunction,
    format: BatchFormat,
    batch: Mapping[str, Tensor],
    *,
    withheld: Sequence[str],
) -> ModelWithLoss:
    """The two as one. ``withheld``: entries of a mapping that the model is not given though it would accept them.

    Raises CaptureError for a loss of torch.nn that would be called with a mapping, entries that are not there, or a loss with weights
    beside a model whose own have the same names.
    """
    if _has_state(loss) and any(name.startswith(LOSS) for name in model.state_dict()):
        raise CaptureError(
            "the model has a module called 'loss_fn', and so are the weights of a loss called in checkpoints: call that module otherwise"
        )
    if format.names is not None:
        if withheld:
            raise CaptureError(
                f"LossOptions(only=) names {', '.join(withheld)}, and the batch is no mapping: leave it out"
            )
        inputs = format.names[: len(format.names) - (format.target is not None)]
        return ModelWithLoss(model, loss, inputs=inputs, positional=True, target=format.target or format.names[0])
    if isinstance(loss, _Loss):
        name = type(loss).__name__
        raise CaptureError(
            f"nn.{name} takes an output and a target, and the batch is a mapping ({', '.join(batch)}): pass a function that "
            f"chooses, loss=lambda output, batch: criterion(output, batch[...]), or batches as tuples (x, y)"
        )
    unknown = [name for name in withheld if name not in batch]
    if unknown:
        raise CaptureError(f"LossOptions(only=) names {', '.join(unknown)}, and the batch has {', '.join(batch)}")
    accepted = [name for name in _accepted(model, batch) if name not in withheld]
    if not accepted:
        raise CaptureError(
            f"{type(model).__name__}.forward takes none of the batch's entries ({', '.join(batch)}): call them as its parameters "
            "are called"
        )
    return ModelWithLoss(model, loss, inputs=accepted, positional=False, target=None)


def _has_state(loss: object) -> bool:
    return isinstance(loss, nn.Module) and bool(loss.state_dict())


def _named_forward(loss: LossFunction) -> LossFunction:
    """The same function under the name ``forward``: of all lines that an op came from, a trace keeps those of functions so called, and a
    refusal shall name the line of the loss."""
    if not isinstance(loss, FunctionType):
        return loss
    code = loss.__code__.replace(co_name="forward")
    named = FunctionType(code, loss.__globals__, "forward", loss.__defaults__, loss.__closure__)
    named.__kwdefaults__ = loss.__kwdefaults__
    return named


def _parts(loss: LossFunction) -> tuple[object, ...]:
    """Return what a copy of a function has as its own."""
    return (loss.__code__, loss.__defaults__, loss.__kwdefaults__) if isinstance(loss, FunctionType) else ()


def _accepted(model: nn.Module, batch: Mapping[str, Tensor]) -> list[str]:
    """The entries that forward names; all of them where it takes ``**kwargs``."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return list(batch)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {p.name for p in parameters if p.kind in by_name}
    return [name for name in batch if name in named]
