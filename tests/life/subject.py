"""What a life is of: a small model, its batches, and what a script may change about it between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CUT", "EVERY", "RUN_WHOLE", "WHOLE", "Batch", "Change", "Subject", "number", "part", "rebound", "weight"]

Batch = dict[str, Tensor] | tuple[Tensor, ...]

WHOLE = ("data", "data 3", "zero 1")
"""Under which each rank holds all weights between steps."""
RUN_WHOLE = ("data", "data 3", "zero 1", "zero 3")
CUT = ("1F1B", "interleaved", "split", "hybrid", "mixed")
EVERY = (*RUN_WHOLE, *CUT, "auto")


@dataclass(frozen=True)
class Change:
    """A line of a script.

    Args:
        kind: of change, as the report counts them.
        names: words of which a refusal must have one, since they name what was changed; or it names the line. ``*``: each parameter.
        line: Python code, run with ``model``, ``criterion``, ``trainer``, ``optimizer`` and others in sight (see `script`).
        values: that ``{}`` in the line stands for, the first one as the model is built; (): there is none.
        alone: whether it may be run on one rank only, which must be noticed.
    """

    kind: str
    names: tuple[str, ...]
    line: str
    values: tuple[str, ...] = ()
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and its script.

    Args:
        build: makes it, with weights from the global generator; it sets globals and class attributes back too.
        batch: ``(samples, **shape)``, drawn from the global generator.
        criterion: makes the loss outside of the model, for batches ``(x, y)``; None: ``model(**batch)`` returns the loss.
        changes: what only this model has.
        plans: the kinds that it can run under.
        shapes: other arguments of ``batch``, for some of the steps.
        loss_count: of a model that torch.export gives no graph of.
        outputs: whether `predict` has anything to return.
        by_sample: the loss is a mean over samples that count alike, so that batches of several sizes can be averaged by their samples.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    criterion: Callable[[], Any] | None = None
    changes: tuple[Change, ...] = ()
    plans: tuple[str, ...] = EVERY
    shapes: tuple[Mapping[str, int], ...] = ()
    loss_count: Any = None
    outputs: bool = False
    by_sample: bool = True
    uses: Mapping[str, Any] = field(default_factory=dict)
    """What else the lines of its changes have in sight, by name."""

    def made(self) -> tuple[nn.Module, Any]:
        """The model and its criterion, the same each time, in the default floating-point type."""
        torch.manual_seed(0)
        wanted = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            model = self.build()
        finally:
            torch.set_default_dtype(wanted)
        if wanted != torch.float32:
            weights, model = model.state_dict(), self.build()
            model.load_state_dict(weights)
        return model.train(), None if self.criterion is None else self.criterion()

    def batches(self, samples: int, seed: int, **shape: int) -> Batch:
        """A batch of so many samples in the default floating-point type."""
        wanted = torch.get_default_dtype()
        torch.manual_seed(1000 + seed)
        torch.set_default_dtype(torch.float32)
        try:
            drawn = self.batch(samples, **shape)
        finally:
            torch.set_default_dtype(wanted)
        if isinstance(drawn, tuple):
            return tuple(_as(wanted, tensor) for tensor in drawn)
        return {name: _as(wanted, tensor) for name, tensor in drawn.items()}


def _as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def number(
    name: str, *values: object, at: str = "model", kind: str = "number on the model", alone: bool = True
) -> Change:
    """A number (or another plain value) that forward or the loss reads; ``alone``: always, so that one rank can be told from the others."""
    written = tuple(repr(value) if not isinstance(value, str) else value for value in values)
    return Change(kind, (name.split(".")[-1].split("[")[0],), f"{at}.{name} = {{}}", written, alone=alone)


def rebound(name: str, *tensors: str, at: str = "model", kind: str = "buffer rebound") -> Change:
    """Another tensor in the place of one: as constants, the first one being what is there at first."""
    word = name.split(".")[-1].split("[")[0]
    words = ("criterion.weight", "'weight'", ".weight") if word == "weight" else (word,)
    return Change(kind, words, f"{at}.{name} = {{}}", tuple(f"torch.tensor({text})" for text in tensors), alone=True)


def weight(path: str, *, kinds: tuple[str, ...] = ("clamped", "scaled", "copied", "data")) -> tuple[Change, ...]:
    """A parameter that is written between steps; ``path``: from the model on, as in Python."""
    at, name = _on_model(path)
    lines = {
        "clamped": f"with torch.no_grad(): {at}.clamp_(-0.2, 0.2)",
        "scaled": f"with torch.no_grad(): {at}.mul_(0.9)",
        "copied": f"with torch.no_grad(): {at}.copy_(torch.linspace(-0.3, 0.3, {at}.numel()).view_as({at}))",
        "data": f"{at}.data = {at}.data * 0.8",
        "clamped under .data": f"{at}.data.clamp_(-0.2, 0.2)",
    }
    return tuple(
        Change(
            "parameter rebound by .data" if kind == "data" else "parameter in place", (name,), lines[kind], alone=True
        )
        for kind in kinds
    )


def part(path: str) -> tuple[Change, ...]:
    """A submodule with parameters, beside which others go on training."""
    at, name = _on_model(path)
    hook = f"hooks.append({at}.register_forward_hook(lambda module, args, output: 0.9 * output))"
    return (
        Change("part frozen or thawed", (name,), f"{at}.requires_grad_({{}})", ("True", "False")),
        Change("hook on a part", (name, "hook"), hook),
        Change("hooks removed", (name, "hook"), "while hooks: hooks.pop().remove()"),
        Change("part replaced", (name,), f"{at} = copy.deepcopy({at})"),
    )


def _on_model(path: str) -> tuple[str, str]:
    """How Python reaches it, and its name in the model."""
    at = f"model{path}" if path.startswith("[") else f"model.{path}"
    return at, path.replace("[", ".").replace("]", "").lstrip(".")
