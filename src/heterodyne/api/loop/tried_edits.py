"""An edit of the output of a module, tried on random numbers before it is made: whether it treats samples one by one, and what it reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from heterodyne.api.loop.module_outputs import Point
from heterodyne.errors import HeterodyneError, PlanError
from heterodyne.module_outputs import Edit, result_of

__all__ = ["tried"]

_TRIED = 3
"""Samples that an edit is tried with: one of them alone, and two together."""


def tried(
    points: Sequence[Point], edit: Edit, model: nn.Module, device: torch.device
) -> tuple[list[Tensor], list[float]]:
    """Return the tensors that the loss trains through an edit of these points of one module, and numbers that come of it, which are
    about the same wherever the same function is tried.

    Raises PlanError for an edit that cannot be made under a plan.
    """
    path = points[0].path
    if len({point.leaf for point in points}) > 1:
        raise PlanError(
            f"{path!r} returns several tensors: edit the modules inside of it that make them, each by its own path"
        )
    found: dict[int, Tensor] = {}
    numbers: list[float] = []
    for point in points:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            made, x = _tried_at(point, edit, device)
        found |= {id(leaf): leaf for leaf in _leaves(made, x)}
        numbers += [float(made.detach().double().sum()), float(made.detach().double().abs().sum())]
    stored = {id(parameter) for parameter in model.parameters()}
    if any(leaf in stored for leaf in found):
        raise PlanError(
            f"the edit of {path!r} reads parameters of the model, which other devices may hold: copy their values before "
            "(with trainer.whole_weights() as model: ...)"
        )
    return list(found.values()), numbers


def _tried_at(point: Point, edit: Edit, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what an edit makes of random numbers, and these. Raises PlanError where it does not treat samples one by one."""
    spec, dim = point.op.outputs[0], point.dim
    if dim is None and not all(size.is_constant for size in spec.shape):
        raise PlanError(
            f"the output of {point.path!r} has no rows of its own for each sample: edited part by part, it is not what the whole "
            "batch gives on one device. Edit a module whose output has the samples in one dim"
        )
    shape = [int(size(_TRIED)) for size in spec.shape]
    dtype = getattr(torch, spec.dtype)
    x = torch.zeros(shape, dtype=dtype)
    x = (x.normal_() if dtype.is_floating_point else x).to(device).requires_grad_(dtype.is_floating_point)

    def edited_of(part: Tensor) -> Tensor:
        return result_of(edit, part.clone(), point.form, point.leaf, point.path)

    try:
        with torch.enable_grad():
            made = edited_of(x)
            cuts = () if dim is None else (1, _TRIED - 1)
            rows = 0 if dim is None else x.shape[dim] // _TRIED
            parts = [edited_of(part) for part in torch.split(x, [cut * rows for cut in cuts], dim or 0)] if cuts else []
    except HeterodyneError:
        raise
    except Exception as error:
        hint = (
            ". If it reads weights of the model, copy their values before (with trainer.whole_weights() as model: ...)"
            if "meta" in str(error)
            else ""
        )
        raise PlanError(
            f"the edit of {point.path!r} fails for a {spec.dtype} tensor of shape {shape}, as {_TRIED} samples have it: "
            f"{type(error).__name__}: {error}{hint}"
        ) from error
    if parts and not torch.allclose(made.float(), torch.cat(parts, dim or 0).float(), 1e-3, 1e-4, equal_nan=True):
        raise PlanError(
            f"the edit of {point.path!r} makes something else of several samples together than of each alone, or of one sample twice "
            "(does it mix samples, or draw random numbers?): devices have parts of a batch. Let it treat each sample by itself"
        )
    return made, x


def _leaves(made: Tensor, x: Tensor) -> list[Tensor]:
    """Return the tensors whose gradients a backward from ``made`` adds to, but for ``x``, in the order in which they are met."""
    found: dict[int, Tensor] = {}
    waiting, known = [made.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not x:
            found[id(leaf)] = leaf
        waiting += [source for source, _ in node.next_functions]
    return list(found.values())
