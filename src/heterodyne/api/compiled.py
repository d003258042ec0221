"""torch.compile: models that come compiled are captured, named and kept as the module inside; stages and models that shall be compiled."""

from __future__ import annotations

import copy
import sys

import torch
from torch import fx, nn

from heterodyne.errors import HeterodyneError
from heterodyne.frontend.regions import compile_graph

__all__ = ["compile_module", "require_compiler", "uncompiled", "with_compiled"]


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
    """Return what runs: the user's ``model``, compiled or not, itself or in the place of the one that ``module`` joins with a loss."""
    inside = uncompiled(model)
    if inside is model:
        return module
    return model if module is inside else _joining(module, model)


def compile_module(module: nn.Module) -> None:
    """Let torch.compile make the module's code, at its first call; as it does for stages."""
    if isinstance(module, fx.GraphModule):
        compile_graph(module)
    else:
        module.compile()


def require_compiler(device: torch.device) -> None:
    """Raises HeterodyneError where torch.compile cannot make code for the device."""
    try:
        torch.compile(lambda x: x.exp() + 1)(torch.ones(8, device=device))
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise HeterodyneError(
            f"torch.compile makes no code for {device.type} here ({type(error).__name__}: {said}): install what it needs, a C++ compiler "
            "for CPUs, triton for GPUs; or leave compile out"
        ) from error


def _joining(module: nn.Module, model: nn.Module) -> nn.Module:
    other = copy.copy(module)
    other._modules = {**module._modules, "model": model}
    return other
