"""What the script has written between two steps: to weights that every rank holds whole, and as options of the optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from heterodyne.code_read import around_of, is_users
from heterodyne.errors import PlanError
from heterodyne.runtime.recapture.read_state import Change
from heterodyne.runtime.same_batch import is_looked_at
from heterodyne.runtime.weights.left import Left

__all__ = ["ScriptWrites"]

_RATES = frozenset({"lr", "initial_lr", "weight_decay"})
"""Options that schedules lead to 0 and back."""


class ScriptWrites:
    """Of one rank, as `Left` tells it: without values where the host would wait for a device.

    Args:
        whole: returns the parameters and buffers that every rank holds whole, by name.
        moved: those that one rank's optimizer may write to outside of its step, and another's not.
        in_parts: no rank's optimizer has all weights whole, so that it must stay what was tried when the model was distributed.
    """

    def __init__(
        self,
        whole: Callable[[], Mapping[str, Tensor]],
        moved: Collection[str],
        optimizer: torch.optim.Optimizer,
        *,
        in_parts: bool,
    ) -> None:
        self._find_whole = whole
        self._written: list[str] = []  # before the latest step
        self._pending: dict[str, None] = {}  # weights that the script had written to when the runtime did
        self._moved = moved
        self._optimizer = optimizer
        self._in_parts = in_parts
        self.found: list[Change] = []
        """Of weights and options, before the latest step."""
        self.state: list[Change] | None = None
        """Of the optimizer's state, which ranks have of their own weights; None: this rank has none."""
        self.find_weights()
        self.leave()

    def leave(self) -> None:
        """From here on whatever writes to weights and options is the script."""
        self._pending.clear()
        self._options = _options(self._optimizer)
        self._tried = _tried(self._optimizer)
        self._versions = _versions(self._optimizer)
        self._left.leave()

    def find_weights(self) -> None:
        """Buffers are others than before."""
        whole = self._find_whole()
        self._left = Left(whole, values=all(tensor.device.type == "cpu" for tensor in whole.values()))

    @contextmanager
    def excepted(self) -> Iterator[None]:
        """Take what writes to weights and state inside for the runtime: it brings ranks that do not train up to date."""
        written, same = self._names(), self._versions == _versions(self._optimizer)
        try:
            yield
        finally:
            self._except(written, same=same)

    def found_before(self) -> None:
        """Take what has written to weights and state since the last `find` for the runtime."""
        self._except(self._written, same=not self.state)

    def _except(self, written: Iterable[str], *, same: bool) -> None:
        self._left.leave()
        self._pending = dict.fromkeys(written)
        self._versions = _versions(self._optimizer) if same else [(0, -1)]

    def find(self, step: int) -> bool:
        """Find what was written before this step. Return whether values are to be compared with other ranks: as soon as other weights are
        written to than before, then now and then. Raises PlanError where the optimizer may need whole weights from now on."""
        self._require_as_tried()
        written = self._names()
        look = bool(written) and (written != self._written or is_looked_at(step))
        self.found = [*self._options_changed(), *(_written(name) for name in written if name not in self._moved)]
        self._written = written
        if self._versions:
            same = self._versions == _versions(self._optimizer)
            self.state = (
                []
                if same
                else [Change(name="the optimizer's state", before="as the last step left it", after="another")]
            )
        return look

    def _require_as_tried(self) -> None:
        if not self._in_parts:
            return
        now = _tried(self._optimizer)
        for name in (*self._tried, *now) if now != self._tried else ():
            if now.get(name) != self._tried.get(name):
                raise PlanError(
                    f"{name} of the optimizer is another than when the model was distributed. An update may now depend on whole weights or "
                    "on all of them, and under this plan a rank's optimizer has a part. Make it so in the function that is passed as "
                    "optimizer=, which is tried before the first step, or train by data parallelism (plan='data', without zero)"
                )
        if self._versions == _versions(self._optimizer) or not _is_torchs(self._optimizer):
            return
        if any(int(tensor.count_nonzero()) for tensor in self._written_state() if tensor.numel() > 1):
            raise PlanError(
                "the state of the optimizer was written to between two steps. Under this plan a rank has a part of it, and what was "
                "computed from that may not be what one device computes. Change it whole: state = trainer.state_dict(), then "
                "trainer.load_state_dict(state)"
            )

    def _written_state(self) -> list[Tensor]:
        """Return the tensors of the state that are others, or were written to, since the last step."""
        left = dict(self._versions)
        state = zip(_state_of(self._optimizer), _versions(self._optimizer), strict=True)
        return [tensor for tensor, (number, version) in state if left.get(number) != version]

    def _names(self) -> list[str]:
        return sorted({*self._pending, *self._left.changed()})

    def _options_changed(self) -> list[Change]:
        now, left = _options(self._optimizer), self._options
        return [
            Change(name=f"the optimizer's {name!r}", before=repr(left.get(name)), after=repr(now.get(name)))
            for name in (now.keys() | left.keys() if now != left else ())
            if now.get(name) != left.get(name)
        ]


def _options(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the numbers among the options of each group."""
    return {
        f"{key} of group {number}": value
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, int | float | str | tuple)
    }


def _versions(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Return which tensors are its state, and how often each was written to; on a device the latest step may still be writing."""
    return [(id(tensor), tensor._version if tensor.is_cpu else 0) for tensor in _state_of(optimizer)]


def _state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _tried(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return what decides how an optimizer updates, beside rates: its class, hooks and options that switch something."""
    found: dict[str, object] = {"the class": type(optimizer)}
    for name, table in (
        ("a hook before the step", optimizer._optimizer_step_pre_hooks),
        ("a hook after the step", optimizer._optimizer_step_post_hooks),
        ("a hook of all optimizers before the step", _global_optimizer_pre_hooks),
        ("a hook of all optimizers after the step", _global_optimizer_post_hooks),
    ):
        found[name] = list(table.values())
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        found["the method step()"] = step
    if _is_torchs(optimizer):
        return found
    own = _named_by_methods(type(optimizer))  # type: ignore[arg-type]  # mypy takes a class for unhashable
    switches: dict[str, set[object]] = {}
    places = [("option", group) for group in optimizer.param_groups]
    for what, place in (*places, ("attribute", vars(optimizer))):
        for key, value in place.items():
            if key in own or key.startswith("_"):  # torch and schedulers keep things there
                continue
            if isinstance(value, bool | str | type(None)):
                switches.setdefault(f"the {what} {key!r}", set()).add(value)
            elif isinstance(value, int | float) and key not in _RATES:
                switches.setdefault(f"the {what} {key!r}", set()).add(value != 0)
    for name, holder, key in _around_steps(type(optimizer)):  # type: ignore[arg-type]
        with suppress(LookupError, ValueError):  # a variable that is gone
            if isinstance(value := holder[key], bool | int | float | str | type(None)):
                switches[f"the variable {name!r} in step()"] = {value}
    return found | switches


@cache
def _around_steps(kind: type) -> list[tuple[str, Any, Any]]:
    """Return the variables around the user's own `step` of an optimizer, with where they are kept."""
    steps = (vars(base).get("step") for base in kind.__mro__)
    written = [inspect.unwrap(step) for step in steps if isinstance(step, FunctionType)]
    return [
        (around.name, around.holder, around.key) for step in filter(is_users, written) for around in around_of(step)
    ]


def _written(name: str) -> Change:
    return Change(name=repr(name), before="as the last step left it", after="written to")


@cache
def _named_by_methods(kind: type) -> frozenset[str]:
    """Return the words and attributes in an optimizer's own methods beside `step`: what these switch, as ``train()`` and ``eval()`` do, is
    its affair.
    """
    methods = (
        made
        for base in kind.__mro__
        if not base.__module__.startswith("torch.optim")
        for name, made in vars(base).items()
        if isinstance(made, FunctionType) and name not in ("__init__", "step")
    )
    codes = [method.__code__ for method in methods]
    return frozenset(word for code in codes for word in (*code.co_consts, *code.co_names) if isinstance(word, str))
