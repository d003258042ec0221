"""Where a module keeps what a graph reads of it: parameters, buffers, constants."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from heterodyne.errors import CaptureError
from heterodyne.frontend.closures import line_that_reads
from heterodyne.frontend.export import Traced

__all__ = ["placed"]


def _constant(traced: Traced, node: fx.Node, module: nn.Module) -> Tensor:
    """Return a tensor of the trace that is no parameter or buffer: its values, or those of the attribute of the module that it was."""
    name = traced.roles[node].name
    value = traced.constants[name]
    if type(value) is not Tensor or value.device.type == "meta":
        path, _, attribute = name.rpartition(".")
        found = getattr(module.get_submodule(path), attribute, None) if path in dict(module.named_modules()) else None
        if not isinstance(found, Tensor):
            line = line_that_reads(node) or f"the constant {name!r} of the model"
            raise CaptureError(
                f"{line}\nThis reads a tensor that is no parameter or buffer of the model and has no values where it is captured "
                "(such as .data of a weight): read the weight itself (.detach()), or keep the tensor as a buffer"
            )
        value = found
    return value.detach()


def placed(
    traced: Traced,
    node: fx.Node,
    module: nn.Module,
    device: torch.device,
    sliced: Mapping[int, int] = MappingProxyType({}),
) -> tuple[dict[str, Any], str]:
    """Return where the module keeps a parameter or buffer; a constant is kept here, on the device.

    ``sliced``: of each dim in which the module has a slice of it, the size of that.
    """
    role = traced.roles[node]
    if role.kind == "constant":
        return {role.name: _constant(traced, node, module).to(device)}, role.name
    path, _, name = role.name.rpartition(".")
    owner = dict(module.named_modules(remove_duplicate=False)).get(path)
    kept: dict[str, Any] = {}
    if owner is not None:
        kept = owner._parameters if role.kind == "parameter" else owner._buffers
    found, known = kept.get(name), node.meta["val"]
    if found is None:
        raise CaptureError(f"the model has no {role.kind} {role.name!r}; it is not the one that was captured")
    shape = list(known.shape)
    for dim, size in sliced.items():
        shape[dim] = size
    if found.dtype is not known.dtype or list(found.shape) != shape:
        raise CaptureError(
            f"the {role.kind} {role.name!r} is {found.dtype} {list(found.shape)}, and was {known.dtype} {shape} when the "
            "model was captured; capture it as it is now"
        )
    return kept, name
