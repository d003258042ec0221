"""Parameters that the code reaches around the module, through a closure or a global: in a graph they would be numbers that never change."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from heterodyne.errors import CaptureError
from heterodyne.frontend.export import Traced
from heterodyne.frontend.faults import line_of

__all__ = ["line_that_reads", "refuse_closures", "refuse_computed"]


def refuse_closures(traced: Traced, model: nn.Module) -> None:
    """Raises CaptureError, with the line, if a parameter of the model is read from elsewhere than the module that is captured.

    The trace runs on a copy of the module, so it takes such a parameter for a constant: it would get no gradient from there.
    """
    names = {p.data_ptr(): name for name, p in model.named_parameters() if not p.is_meta and p.numel()}
    for node, role in traced.roles.items():
        constant = traced.constants.get(role.name) if role.kind == "constant" else None
        # A stand-in has no memory to be known by.
        name = (
            names.get(constant.data_ptr())
            if type(constant) is Tensor and constant.layout is torch.strided and not constant.is_meta
            else None
        )
        if name is None:
            continue
        replaced = next(
            (path or type(model).__name__ for path, part in model.named_modules() if "forward" in vars(part)), ""
        )
        if replaced:
            raise CaptureError(
                f"The model cannot be captured.\nThe forward of {replaced!r} was replaced on the object, by a function that reaches the "
                f"module it was made with, here its {name!r}. Write a subclass with that forward, or a module that calls this one."
            )
        raise CaptureError(
            "\n".join(filter(None, ["The model cannot be captured.", line_that_reads(node)]))
            + f"\nThis reads the parameter {name!r} of the model through a closure or a global, not as an attribute of the module, so it "
            "would get no gradient from there. Put the model and this term into one nn.Module that returns the loss from its forward, "
            "and reads its parameters from self."
        )


def refuse_computed(traced: Traced) -> None:
    """Raise CaptureError, with the line, if forward reads a tensor that was computed from others before, and is kept in the model."""
    for node, role in traced.roles.items():
        if role.kind == "constant" and role.name in traced.computed:
            raise CaptureError(
                "\n".join(filter(None, ["The model cannot be captured.", line_that_reads(node)]))
                + f"\nThis reads {role.name!r}, which was computed from other tensors before this forward and is kept in the model. "
                "The graph has its values alone, so no gradient would reach what it was computed from. Compute it in forward, or keep "
                "it without a history (.detach().clone(), best as a buffer)"
            )


def line_that_reads(node: fx.Node) -> str:
    """Return the line of the first op that reads it, perhaps through ops of torch.export's own."""
    readers = list(node.users)
    for reader in readers:
        if line := line_of(reader, full=True):
            return line
        readers.extend(user for user in reader.users if user not in readers)
    return ""
