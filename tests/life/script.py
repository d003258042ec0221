"""A script of a life, run by `hd.distribute` or by plain PyTorch on one device: the same lines act on either."""

from __future__ import annotations

import contextlib
import copy
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.errors import HeterodyneError
from heterodyne.model_output import loss_of
from life.optimizers import OPTIMIZERS
from life.subject import Batch, Subject

__all__ = ["SAMPLES", "SCRIPT", "Line", "Plain", "Record", "number_of", "played", "told"]

SAMPLES = 7
SCRIPT = "life.py"


@dataclass(frozen=True)
class Line:
    """``step``: that it comes before. ``rank``: the only one that runs it; None: all do. ``line``: "" for the step itself."""

    step: int
    kind: str = "step"
    names: tuple[str, ...] = ()
    line: str = ""
    rank: int | None = None
    shape: tuple[tuple[str, int], ...] = ()


@dataclass
class Record:
    """What a script came to: a value for each of its lines (None: it has none), and the tensors at its end.

    ``refused``: the message of a HeterodyneError in the line behind the last value; ``crashed``: the traceback of another exception.
    """

    values: list[Any] = field(default_factory=list)
    end: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    refused: str = ""
    crashed: str = ""


class Plain:
    """Plain PyTorch on one device, with the methods of `hd.Distributed` that scripts call."""

    rank = 0

    def __init__(self, subject: Subject, model: nn.Module, criterion: Any, optimizer: str) -> None:
        self._model, self._criterion = model, criterion
        self.optimizer = OPTIMIZERS[optimizer](p for p in model.parameters() if p.requires_grad)

    def step(self, batch: Batch) -> SimpleNamespace:
        self.optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        self.optimizer.step()
        return SimpleNamespace(loss=loss.item())

    def _loss(self, batch: Batch) -> Tensor:
        if isinstance(batch, tuple):
            loss: Tensor = self._criterion(self._model(*batch[:-1]), batch[-1])
            return loss
        return loss_of(self._model(**batch))

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        with torch.no_grad():
            yield
        for module, training in modes.items():
            module.training = training

    def evaluate(self, batch: Batch) -> float:
        with self._evaluating():
            return self._loss(batch).item()

    def validate(self, batches: Iterable[Batch]) -> dict[str, float]:
        sizes, losses = zip(*((_samples(batch), self.evaluate(batch)) for batch in batches), strict=True)
        return {"loss": sum(size * loss for size, loss in zip(sizes, losses, strict=True)) / sum(sizes)}

    def predict(self, batch: tuple[Tensor, ...]) -> Any:
        with self._evaluating():
            return self._model(*batch[:-1])

    def state_dict(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # or later steps write into what it was given

    def optimizer_state(self) -> dict[str, Tensor]:
        """Of what the model still has, by the name of the parameter and of the value."""
        return {
            f"{name} {key}": value.clone()
            for name, parameter in self._model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.dim()
        }


def number_of(place: int) -> int:
    """In the file that a script is as if it were, the first line of what stands at that place."""
    return 10 * place + 1


def _samples(batch: Batch) -> int:
    return len(batch[0] if isinstance(batch, tuple) else next(iter(batch.values())))


def played(
    subject: Subject, model: nn.Module, criterion: Any, trainer: Any, lines: Sequence[Line], record: Record
) -> None:
    """Run the lines of a script one after the other, into the record."""
    plain = isinstance(trainer, Plain)
    after_step: list[Callable[[], object]] = []
    noted: list[Any] = []
    sight = {
        "model": model,
        "criterion": criterion,
        "trainer": trainer,
        "optimizer": trainer.optimizer,
        "after_step": after_step,
        "hooks": [],
        "kept": {},
        "note": noted.append,
        "batch": subject.batches,
        "torch": torch,
        "nn": nn,
        "F": F,
        "copy": copy,
        "whole_weights": getattr(trainer, "whole_weights", contextlib.nullcontext),
        **subject.uses,
    }
    for place, line in enumerate(lines):
        noted.clear()
        if not line.line:
            noted.append(trainer.step(subject.batches(SAMPLES, line.step, **dict(line.shape))).loss)
            for call in after_step:
                call()
        elif line.rank is None or (line.rank == trainer.rank and not plain):
            # As if the script were a file, in which this is the line of that number.
            exec(compile("\n" * (number_of(place) - 1) + line.line, SCRIPT, "exec"), sight)
        record.values.append(copy.deepcopy(noted))


@contextlib.contextmanager
def told(record: Record) -> Iterator[None]:
    """Exceptions end the script, and are noted."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except HeterodyneError as error:
        record.refused = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # whatever it is, it is an outcome
        record.crashed = "".join(traceback.format_exc().splitlines(keepends=True)[-14:])
