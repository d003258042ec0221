"""The optimizer of a Lightning script while a plan updates its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from heterodyne.api import Distributed
from heterodyne.api.loop.remade_optimizer import by_name, by_number
from heterodyne.errors import CheckpointError

__all__ = ["ScriptOptimizer"]


class ScriptOptimizer:
    """Keeps which parameters are in which group, and a state that is restored before there is a plan."""

    def __init__(self, script: Optimizer) -> None:
        self.script = script
        self._names: list[list[str]] = []
        self._restored: Mapping[int, Any] | None = None

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set the rates now, and the state with the plan. Raises CheckpointError if it is of another optimizer."""
        if [len(g["params"]) for g in saved["param_groups"]] != [len(g["params"]) for g in self.script.param_groups]:
            raise CheckpointError(
                "the checkpoint's optimizer has other parameter groups: resume with the one that wrote it"
            )
        self.script.load_state_dict({**saved, "state": {}})
        self._restored = saved["state"]

    def name(self, step: nn.Module) -> None:
        """Note the names that its parameters have in ``step``."""
        names = {id(parameter): name for name, parameter in step.named_parameters()}
        self._names = [[names[id(p)] for p in group["params"]] for group in self.script.param_groups]

    def hand_over(self, distributed: Distributed, steps: int) -> None:
        """Leave the parameters, and what was restored behind so many steps, to a plan. Collective."""
        for group in self.script.param_groups:
            group["params"] = []  # the plan may have left them to other ranks
        if self._restored is not None or steps:
            state = distributed.state_dict()
            state["optimizer"] = by_name(self._restored or {}, self._names)
            distributed.load_state_dict(state | {"step": steps})

    def state(self, distributed: Distributed) -> dict[str, Any]:
        """Return the state as torch has it, of the whole model, on every rank. Collective."""
        return by_number(distributed.state_dict()["optimizer"], self._names, self.script)

    def take_back(self, state: dict[str, Any], step: nn.Module) -> None:
        """Have the parameters again, with this state."""
        back = dict(step.named_parameters())
        for group, names in zip(self.script.param_groups, self._names, strict=True):
            group["params"] = [back[name] for name in names]
        self.script.load_state_dict(state)
