"""A LightningModule's ``training_step`` as a module that returns its loss, and what it logs on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from heterodyne.api import Distributed
from heterodyne.errors import DataError, HeterodyneError, NoGraphError
from heterodyne.frontend.faults import line_now
from heterodyne.model_output import loss_of
from heterodyne.runtime.evaluation import eval_mode

__all__ = [
    "BatchForm",
    "Logged",
    "TrainingStep",
    "ValidationStep",
    "joined",
    "log_of_all",
    "require_mean",
    "size_of",
    "what_it_logs",
]


class BatchForm:
    """How batches are nested, as the first one was: tensors by name out, and back. Raises DataError for what is no tensor."""

    def __init__(self, batch: Any) -> None:
        self._kind: Any = type(batch) if isinstance(batch, Mapping) else None  # a tokenizer's mapping is no dict
        leaves, self._spec = self._flat(batch)
        self._names = [f"batch_{number}" for number in range(len(leaves))]
        if self._kind is not None and len(leaves) == len(batch):
            self._names = sorted(map(str, batch))
        self.named(batch)

    def named(self, batch: Any) -> dict[str, Tensor]:
        leaves, spec = self._flat(batch)
        if spec != self._spec:
            raise DataError("the batch is nested in another way than the first one: let collate_fn make all alike")
        for name, leaf in zip(self._names, leaves, strict=True):
            if not isinstance(leaf, Tensor):
                raise DataError(
                    f"{name} of the batch is a {type(leaf).__name__}, not a tensor: let collate_fn make a tensor of it, or leave it out"
                )
        return dict(zip(self._names, leaves, strict=True))

    def _flat(self, batch: Any) -> tuple[list[Any], Any]:
        if self._kind is None or not isinstance(batch, Mapping):
            return pytree.tree_flatten(batch)
        return pytree.tree_flatten({str(name): batch[name] for name in sorted(batch, key=str)})

    def batch(self, named: Mapping[str, Tensor]) -> Any:
        made = pytree.tree_unflatten([named[name] for name in self._names], self._spec)
        return made if self._kind is None else self._kind(made)


@dataclass(frozen=True, kw_only=True)
class Logged:
    """A call of ``self.log``. ``values``: (value, samples) of each part; ``arguments``: the others of the call.

    ``of``: the ``loss`` itself, a ``mean`` over samples, or something else, which the values of parts do not tell.
    """

    values: list[tuple[float, int]]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    of: str = "other"


@dataclass(eq=False)
class _Surroundings:
    """What all copies of a `TrainingStep` share: the Trainer, the arguments beside the batch, and the notes of what is logged."""

    form: BatchForm
    trainer: Any
    more: tuple[Any, ...]
    notes: dict[str, Logged] | None = None
    losses: set[str] = field(default_factory=set)

    def __deepcopy__(self, memo: object) -> _Surroundings:
        return self


class _UnknownToGraph:
    """Stands for what changes from step to step while a graph is made, which would hold for one step alone."""

    def __init__(self, what: str) -> None:
        self._what = what

    def _read(self, *_: object) -> NoReturn:
        line, reason = line_now(), f"training_step reads {self._what}, which no graph can follow from step to step"
        raise NoGraphError(f"training_step cannot be captured.\n{line}\n{reason}", reason=f"{line} ({reason})")

    def __getattr__(self, name: str) -> NoReturn:
        self._read()

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = __sub__ = __mul__ = __truediv__ = __mod__ = __floordiv__ = (
        _read
    )
    __radd__ = __rsub__ = __rmul__ = __bool__ = __int__ = __index__ = __float__ = _read
    __hash__ = None  # type: ignore[assignment]


class TrainingStep(nn.Module):
    """Called with the tensors of a batch by name it runs ``module.training_step`` and returns the loss.

    While a graph is made, ``batch_idx`` and ``self.trainer`` cannot be read, so a step that does is run as it is. What is logged goes
    into notes: under a plan it is a value of some samples, and the Trainer is to have that of all.
    """

    def __init__(self, module: nn.Module, form: BatchForm, trainer: Any, more: tuple[Any, ...]) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self.surroundings = _Surroundings(form, trainer, more)

    def forward(self, **tensors: Tensor) -> Tensor:
        shared, module = self.surroundings, cast(Any, self.module)
        exporting = torch.compiler.is_exporting()
        unknown, number = _UnknownToGraph("self.trainer"), _UnknownToGraph("batch_idx")
        logged: list[tuple[str, Any, Any, Any]] = []

        def log(name: str, value: Any, *others: Any, **options: Any) -> None:
            if hasattr(value, "compute"):
                _refuse_metric(name)
            logged.append((name, value, others, options))

        kept = module._trainer
        module.trainer = unknown if exporting else shared.trainer
        module.log = log  # of this object, for this call: as Lightning does with forward
        before = _updates(module)
        try:
            more = (number,) * len(shared.more) if exporting else shared.more
            loss = loss_of(module.training_step(shared.form.batch(tensors), *more))
        finally:
            del module.log
            module.trainer = kept
        for name, count in _updates(module).items():
            if count != before[name]:
                _refuse_metric(name)
        if shared.notes is not None and not exporting:
            _note(shared, logged, loss, size_of(tensors))
        return loss

    @contextmanager
    def without_trainer(self) -> Iterator[None]:
        """Take the Trainer from the module inside of the block, but for its calls: what changes in it is no state of the model."""
        module = cast(Any, self.module)
        kept, module.trainer = module._trainer, None
        try:
            yield
        finally:
            module.trainer = kept

    @contextmanager
    def notes(self) -> Iterator[dict[str, Logged]]:
        """Note what is logged inside of the block, by name."""
        found: dict[str, Logged] = {}
        self.surroundings.notes = found
        try:
            yield found
        finally:
            self.surroundings.notes = None


class ValidationStep(nn.Module):
    """``validation_step`` as the forward of a module, so that it can be called with other weights."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.validation_step(*args)


def _note(shared: _Surroundings, logged: list[tuple[str, Any, Any, Any]], loss: Tensor, samples: int) -> None:
    assert shared.notes is not None
    for name, value, others, options in logged:
        kept = shared.notes.setdefault(name, Logged(values=[], arguments=(others, options)))
        kept.values.append((float(value.detach() if isinstance(value, Tensor) else value), samples))
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == loss.untyped_storage().data_ptr():
            shared.losses.add(name)


def what_it_logs(step: TrainingStep, batch: Mapping[str, Tensor]) -> dict[str, Logged]:
    """Found by running the step in eval mode on two samples, together and one by one."""
    size, device = min(2, size_of(batch)), next(iter(step.parameters())).device

    def run(first: int, count: int) -> dict[str, Logged]:
        rows = {
            name: tensor[first : first + count] if tensor.dim() and len(tensor) == size_of(batch) else tensor
            for name, tensor in batch.items()
        }
        with torch.no_grad(), eval_mode(step), step.notes() as found:
            step(**{name: tensor.to(device) for name, tensor in rows.items()})
        return found

    whole = run(0, size)
    losses = frozenset(step.surroundings.losses)
    alone = [run(number, 1) for number in range(size)] if set(whole) - losses else []

    def of(name: str, logged: Logged) -> str:
        if name in losses:
            return "loss"
        parts = [part[name].values[0][0] for part in alone if name in part]
        is_mean = len(parts) == size and math.isclose(
            sum(parts) / size, logged.values[0][0], rel_tol=1e-5, abs_tol=1e-7
        )
        return "mean" if is_mean else "other"

    return {name: Logged(values=[], arguments=one.arguments, of=of(name, one)) for name, one in whole.items()}


def log_of_all(
    module: Any,
    known: Mapping[str, Logged],
    notes: Mapping[str, Logged],
    *,
    loss: float,
    samples: int,
    every: Callable[[Any], list[Any]],
) -> list[str]:
    """Log for ``module`` what the whole step would log, from each rank's ``notes``; ``every`` gathers objects. Return what is left out."""
    found: list[Mapping[str, Logged]] = [notes]
    if any(logged.of == "mean" for logged in known.values()):
        found = every({name: Logged(values=noted.values, arguments=((), {})) for name, noted in notes.items()})
    missing = []
    for name, logged in known.items():
        parts = [pair for noted in found if name in noted for pair in noted[name].values]
        if logged.of != "loss" and (logged.of != "mean" or not parts):
            missing.append(name)  # in a later step: training_step has not logged it this time
            continue
        value = loss if logged.of == "loss" else sum(v * n for v, n in parts) / sum(n for _, n in parts)
        others, options = logged.arguments
        module.log(name, value, *others, **(options | ({"batch_size": samples} if options.get("batch_size") else {})))
    return missing


def size_of(batch: Mapping[str, Tensor]) -> int:
    """The samples of a batch: dim 0 of its first tensor that has one. Raises DataError."""
    for tensor in batch.values():
        if tensor.dim():
            return len(tensor)
    raise DataError("no tensor of the batch has a dimension for its samples: stack samples along dim 0")


def _updates(module: nn.Module) -> dict[str, int]:
    """Return how often the metrics of torchmetrics in the module have been updated."""
    return {name: part.update_count for name, part in module.named_modules() if hasattr(part, "update_count")}


def _refuse_metric(name: str) -> NoReturn:
    raise HeterodyneError(
        f"training_step updates the metric {name!r} of torchmetrics, and each rank has only its own samples there: log a value, as "
        "self.log(name, (scores.argmax(-1) == y).float().mean()), or update the metric in validation_step"
    )


def joined(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Accumulated batches as one. Raises DataError if they cannot be."""
    first, *others = batches
    if not others:
        return dict(first)
    size = size_of(first)
    try:
        return {
            name: torch.cat([batch[name] for batch in batches]) if t.dim() and len(t) == size else t
            for name, t in first.items()
        }
    except RuntimeError as error:
        raise DataError(
            f"the batches of a step have different shapes ({error}): pad them to one length, or take larger batches without "
            "accumulate_grad_batches"
        ) from error


def require_mean(distributed: Distributed, batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Raises DataError unless the loss of accumulated batches is the mean of their losses, which Lightning takes."""
    if len(batches) == 1:
        return
    weights, kind = distributed.loss_weights(batches), distributed.graph.loss.reduction
    if kind != "mean" or any(not math.isclose(weight * len(batches), 1.0) for weight in weights):
        raise DataError(
            f"the loss of the {len(batches)} batches of a step is not the mean of their losses (their weights in it are "
            f"{', '.join(f'{weight:.4g}' for weight in weights)}, and it is a {kind}): take a batch size {len(batches)} times as large "
            "without accumulate_grad_batches"
        )
