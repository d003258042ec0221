"""States under the names of the user's own model, where the runtime has it together with its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from heterodyne.runtime.weights.optimizer import OptimizerFactory, takes_names

__all__ = ["LOSS", "StateNames"]

_MODEL, LOSS = "model.", "loss_fn."
_AVERAGES = "averages"
_LOSS_STATE = "loss"
"""Where the state dict of a loss that is a module stands in the state of a loop."""


class StateNames:
    """Between the names of the captured module and those of the user's model. ``wrapped``: the one has the other and its loss inside; else
    their names are the same. ``loss``: the loss has parameters or buffers."""

    def __init__(self, *, wrapped: bool, loss: bool = False) -> None:
        self._wrapped = wrapped
        self._loss = loss

    def own(self, name: str) -> str:
        """The user's name of a parameter; one of the loss keeps that of the captured module."""
        return name.removeprefix(_MODEL) if self._wrapped else name

    def own_model(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Of a state dict of the captured module what is the user's model's."""
        if not self._wrapped:
            return dict(weights)
        return {name.removeprefix(_MODEL): value for name, value in weights.items() if name.startswith(_MODEL)}

    def own_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """``model``, ``optimizer`` and what else there is under the user's names; of a loss with a state also ``loss``."""
        if not self._wrapped:
            return dict(state)
        found = {**state, "model": self.own_model(state.get("model", {}))}
        found["optimizer"] = {self.own(name): value for name, value in state.get("optimizer", {}).items()}
        of_loss = {
            name.removeprefix(LOSS): value for name, value in state.get("model", {}).items() if name.startswith(LOSS)
        }
        found |= _renamed_averages(state, self.own)
        return {**found, _LOSS_STATE: of_loss} if of_loss else found

    def captured_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `own_state`."""
        if not self._wrapped:
            return dict(state)
        found = {key: value for key, value in state.items() if key != _LOSS_STATE}
        found["model"] = {
            **{f"{_MODEL}{name}": value for name, value in state.get("model", {}).items()},
            **{f"{LOSS}{name}": value for name, value in state.get(_LOSS_STATE, {}).items()},
        }
        found["optimizer"] = {self.captured(name): value for name, value in state.get("optimizer", {}).items()}
        return found | _renamed_averages(state, self.captured)

    def captured(self, name: str) -> str:
        """The inverse of `own`."""
        of_loss = self._loss and name.startswith(LOSS)
        return name if not self._wrapped or of_loss else f"{_MODEL}{name}"

    def captured_keys(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """The same for the keys that lead to an entry of a state."""
        part, *path = keys
        if not self._wrapped or not path:
            return keys
        if part == _LOSS_STATE:
            return ("model", f"{LOSS}{path[0]}", *path[1:])
        if part == _AVERAGES:
            return (part, *path[:2], *map(self.captured, path[2:]))
        return (part, self.captured(path[0]), *path[1:]) if part in ("model", "optimizer") else keys

    def of_factory(self, factory: OptimizerFactory) -> OptimizerFactory:
        """The factory, given the user's names if it takes names."""
        if not self._wrapped or not takes_names(factory):
            return factory

        def renamed(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            return factory([(self.own(name), parameter) for name, parameter in named_parameters])

        return renamed


def _renamed_averages(state: Mapping[str, Any], renamed: Callable[[str], str]) -> dict[str, Any]:
    """Return the averages of a state under other names of their weights; nothing if it has none."""
    found = {
        number: {**saved, "weights": {renamed(name): value for name, value in saved.get("weights", {}).items()}}
        for number, saved in state.get(_AVERAGES, {}).items()
    }
    return {_AVERAGES: found} if found else {}
