"""What the Trainer, its scheduler and its callbacks see of the optimizer of a rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from heterodyne.errors import CheckpointError

__all__ = ["SteppedByPlan", "grouped"]


class SteppedByPlan(Optimizer):
    """The parameter groups of this rank's optimizer, so that schedulers set its rates; `Distributed.step` makes the update.

    The state of the parameters is kept by `Distributed.save_checkpoint`, not here.
    """

    def __init__(self, real: Optimizer) -> None:
        super().__init__(real.param_groups, dict(real.defaults))  # schedulers read the rate there

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing: the update was made by the step of the plan."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Rates and other values of the groups. Raises CheckpointError for a state that no plan has written."""
        if state_dict["state"]:
            raise CheckpointError(
                "the checkpoint is that of a plain Trainer, whose optimizer state is not read: begin with its weights, "
                "from_pretrained(checkpoint), or finish that run where it began"
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})


def grouped(
    kind: Callable[..., Optimizer], decayed: Collection[str], decay: float, options: Mapping[str, Any]
) -> Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]:
    """Makes an optimizer with the Trainer's two groups, decayed and not, of the parameters that a rank holds."""

    def factory(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        named = list(named_parameters)
        groups = [
            {"params": [p for name, p in named if name in decayed], "weight_decay": decay},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ]
        return kind(groups, **options)

    return factory
