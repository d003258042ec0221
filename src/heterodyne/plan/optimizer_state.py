"""What optimizers keep of each parameter: one count for the planner's memory and for the runtime's check of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from heterodyne.job import OptimizerName

__all__ = ["host_values", "state_values", "values_an_element"]

_BLOCK, _LEAST_QUANTIZED, _CODES, _CODE = 256, 4096, 256, 0.25
"""torchao's 8-bit optimizers: elements to a scale, elements of the least weight that is quantized, values of a code, and a code in fp32
values."""


def values_an_element(optimizer: OptimizerName, momentum: float) -> float:
    """Return what the optimizer keeps for each element of large parameters, in fp32 values."""
    quantized = 2 * (_CODE + 1 / _BLOCK)
    return {"adamw": 2, "adamw8bit": quantized, "sgd": int(momentum > 0), "adafactor": 0}[optimizer]


def state_values(optimizer: OptimizerName, momentum: float, shape: Sequence[int]) -> float:
    """Return the state of one parameter of that shape, in fp32 values, with what does not follow its elements: of Adafactor a row and a
    column for each matrix, or all elements of a vector; of 8 bits two tables of what a code stands for, or fp32 values where torchao does
    not quantize.
    """
    if optimizer == "adamw8bit":
        blocks = prod(shape) >= _LEAST_QUANTIZED and prod(shape) % _BLOCK == 0
        return values_an_element(optimizer, momentum) * prod(shape) + 2 * _CODES if blocks else 2 * prod(shape)
    if optimizer != "adafactor":
        return values_an_element(optimizer, momentum) * prod(shape)
    return prod(shape[:-1]) + prod((*shape[:-2], shape[-1])) if len(shape) > 1 else prod(shape)


def host_values(optimizer: OptimizerName, momentum: float, shape: Sequence[int]) -> float:
    """Return what the host holds of a parameter that is updated there, in values of the width of its state: itself, its gradient, and its
    state.
    """
    return 2 * prod(shape) + state_values(optimizer, momentum, shape)
