"""fp32 master weights of parameters in 16 bits (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1).

bf16 has 8 significant bits: 256 + 1 is 256, for gradients that are summed over micro-batches as for weights that take small steps. So
the gradients of such parameters are accumulated, reduced and clipped in fp32 (``Tensor.grad_dtype``), the optimizer updates
fp32 copies, and the model gets these rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["MasterWeights", "gradient_dtype"]

_MASTER = "master"


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """In which the gradients of a parameter are accumulated."""
    return parameter.grad_dtype or parameter.dtype


class MasterWeights:
    """What the optimizer of one rank updates.

    Args:
        parameters: every trained parameter of this rank by name. Those in 16 bits get fp32 gradients until `close`.

    ``updated``: by name, what the optimizer is made of: the master of a parameter in 16 bits, any other parameter itself.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._masters = {n: _master(p) for n, p in parameters.items() if p.is_floating_point() and p.itemsize < 4}
        self.updated: dict[str, nn.Parameter] = {n: self._masters.get(n, p) for n, p in parameters.items()}
        for name in self._masters:
            parameters[name].grad = None
            parameters[name].grad_dtype = torch.float32

    @property
    def masters(self) -> Mapping[str, nn.Parameter]:
        return self._masters

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the masters by the gradients of their parameters, and round them into these."""
        for name, master in self._masters.items():
            master.grad = self._parameters[name].grad
        optimizer.step()
        for master in self._masters.values():
            master.grad = None
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Give the model the masters, rounded."""
        for name, master in self._masters.items():
            self._parameters[name].copy_(master)

    def with_masters(self, state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The optimizer's state by name, with the master of each parameter that has one."""
        found = {name: dict(values) for name, values in state.items()}
        for name, master in self._masters.items():
            found.setdefault(name, {})[_MASTER] = master.detach()
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The inverse of `with_masters`, after the model's own weights are loaded.

        Without a master in ``state`` the weight itself is taken. A master of a parameter that has none here, because the model is now in
        fp32, is its weight.
        """
        rest: dict[str, dict[str, Any]] = {}
        for name, values in state.items():
            others = {key: value for key, value in values.items() if key != _MASTER}
            if _MASTER in values and name in self._parameters and name not in self._masters:
                self._parameters[name].copy_(values[_MASTER])
            if others:
                rest[name] = others
        for name, master in self._masters.items():
            master.copy_(state.get(name, {}).get(_MASTER, self._parameters[name]))
        return rest

    def close(self) -> None:
        """Let the gradients of the user's parameters have their own dtype again."""
        for name in self._masters:
            parameter = self._parameters[name]
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype


def _master(parameter: nn.Parameter) -> nn.Parameter:
    master = nn.Parameter(parameter.detach().float())
    master.__dict__.update(parameter.__dict__)  # marks that an optimizer's groups may be made by
    return master
