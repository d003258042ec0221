"""What a copy of a traced node needs to run on another device, or for another number of samples."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from heterodyne.graph import Size

__all__ = ["evaluated", "on_device"]


def on_device(node: fx.Node, device: torch.device) -> None:
    """Let an op that names a device make its tensors on another."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    node.args = tuple(moved(value) for value in node.args)
    node.kwargs = {name: moved(value) for name, value in node.kwargs.items()}


def evaluated(graph: fx.Graph, size: Size, samples: fx.Node) -> Any:
    """A polynomial of the samples, by Horner's rule."""
    result: Any = 0
    for coefficient in reversed(size.coefficients):
        if isinstance(result, fx.Node):
            result = graph.call_function(operator.mul, (result, samples))
        elif result:
            result = samples if result == 1 else graph.call_function(operator.mul, (samples, result))
        if coefficient:
            result = (
                graph.call_function(operator.add, (result, coefficient)) if isinstance(result, fx.Node) else coefficient
            )
    return result
