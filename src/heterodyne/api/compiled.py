"""``torch.compile``d models: captured, named and kept as the module inside; run compiled where the module runs as it is."""

from __future__ import annotations

import copy
import sys

from torch import nn

__all__ = ["uncompiled", "with_compiled"]


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside of ``torch.compile(module)``, whose names have no ``_orig_mod.`` before them; any other module itself.

    Of a module that joins a compiled ``model`` and a loss, one that joins the module inside and the loss.
    """
    dynamo = sys.modules.get("torch._dynamo")  # where nobody has loaded it, nothing is compiled
    if dynamo is None:
        return model
    if isinstance(model, dynamo.OptimizedModule):
        inside: nn.Module = model._orig_mod
        return inside
    joined = model._modules.get("model")
    return _joining(model, joined._orig_mod) if isinstance(joined, dynamo.OptimizedModule) else model


def with_compiled(module: nn.Module, model: nn.Module) -> nn.Module:
    """What runs: the user's ``model``, compiled or not, itself or in the place of the one that ``module`` joins with a loss."""
    inside = uncompiled(model)
    if inside is model:
        return module
    return model if module is inside else _joining(module, model)


def _joining(module: nn.Module, model: nn.Module) -> nn.Module:
    other = copy.copy(module)
    other._modules = {**module._modules, "model": model}
    return other
