"""What an optimizer must see at once: an element, a whole weight, or the whole model. Found by trying, on weights of a few elements.

A rank steps the weights that it holds. Where weights are sharded it holds parts of them, so the update must be elementwise there (AdamW,
SGD); under pipelines it holds some of the weights, so the update of one must not depend on others (Muon, Adafactor and LAMB are good
there, what takes a norm over the whole model is not).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heterodyne.errors import HeterodyneError
from heterodyne.job import Reach
from heterodyne.runtime.checkpoint.random_state import unchanged_random_state
from heterodyne.runtime.weights.optimizer import OptimizerFactory, optimizer_of
from heterodyne.runtime.weights.optimizer_trace import Trace, Weights, differ, draws, joined, trace_of

__all__ = ["Tried", "left_out", "reach_of"]

_SIZE = 4
_LARGE = (2, 33 * 128)
"""Of one weight, so that state that is kept in blocks shows: 8-bit optimizers quantize 256 values at a time, of weights of 4,096 elements
and more (torchao, bitsandbytes). Both halves of this one are that large, and end in the middle of a block."""
_SCALES = (1e-5, 1e-5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1e3, 1e3)
"""Of the gradients of each step: what stands below an eps shows, what is only clipped above some norm, and what needs some steps."""
_LEAST_RATE = 1e-3  # with a smaller one, or 0 as before a warm-up, rounding hides how the update is made


class _NotTriedError(Exception):
    """It cannot be made or stepped: what the optimizer is called, and why."""


class Tried(NamedTuple):
    """What the update of an element may depend on, in the optimizer called ``name``.

    ``untried``: why nothing is known of it, so that it is taken to need the whole model; "" if it was tried.
    """

    reach: Reach
    name: str
    untried: str = ""


def reach_of(factory: OptimizerFactory, parameters: Mapping[str, Tensor]) -> Tried:
    """Try the optimizer that a factory makes of small weights in the place of these parameters.

    They have the same names and numbers of dims, at most 4 elements a dim, and are two for each pattern of names (``layers.#.weight``),
    all where the factory fails on these; one of them is larger where the model has a large one. Ten steps with random gradients are made:
    with all together, with each half of them, with each dtype first, and as the shards of two ranks along each dim. After each step
    updates, state, options of groups and numbers in attributes are compared. Compiled steps run as Python.

    Couplings that only show in still larger weights or after more steps, and that no number of the optimizer tells of, are not seen.

    Raises HeterodyneError for an optimizer that needs a closure to step, draws random numbers, or keeps gradients from step to step.
    """
    with unchanged_random_state(), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        few = _small(parameters, few=True)
        try:
            return _tried(factory, few)
        except _NotTriedError as error:
            name, why = error.args
        try:
            if len(few) < len(parameters):
                return _tried(factory, _small(parameters, few=False))
        except _NotTriedError as error:
            name, why = error.args
        return Tried("model", name, why)


def left_out(factory: OptimizerFactory, parameters: Mapping[str, Tensor]) -> list[str]:
    """Those of the parameters that the optimizer which a factory makes does not update; none where it cannot be made of small ones."""
    small = {name: nn.Parameter(weight) for name, weight in _small(parameters, few=False).items()}
    with suppress(Exception), unchanged_random_state():
        taken = {id(p) for group in optimizer_of(factory, small).param_groups for p in group["params"]}
        if taken <= {id(parameter) for parameter in small.values()}:
            return [name for name, parameter in small.items() if id(parameter) not in taken]
    return []


def _tried(factory: OptimizerFactory, whole: Weights) -> Tried:
    """Raises _NotTriedError, with the optimizer's name and the reason."""
    gradients = [{n: scale * torch.randn(w.shape, dtype=w.dtype) for n, w in whole.items()} for scale in _SCALES]
    together, name = _stepped(factory, whole, gradients, _all_of)
    # The generators are further on now.
    again, _ = _stepped(factory, whole, gradients, _all_of)
    if draws(together, again):
        raise HeterodyneError(
            f"the step of {name} draws random numbers, so replicas of a weight would drift apart: add the noise to the loss or "
            "to the data, or take an optimizer without it"
        )
    if all(torch.equal(weight, together[-1].weights[n]) for n, weight in whole.items()):
        raise _NotTriedError(name, "on small weights it moves none of them")
    for part in (*_halves(list(whole)), *_other_dtypes_first(whole)):
        alone, _ = _stepped(factory, {n: whole[n] for n in part}, gradients, _all_of, of_all=whole)
        if differ(together, alone, again):
            return Tried("model", name)
    for dim in range(max((w.dim() for w in whole.values()), default=0)):
        if _depends_on_shards(factory, whole, gradients, (together, again), dim):
            return Tried("weight", name)
    return Tried("element", name)


def _depends_on_shards(
    factory: OptimizerFactory,
    whole: Weights,
    gradients: Sequence[Weights],
    wanted: tuple[Sequence[Trace], Sequence[Trace]],
    dim: int,
) -> bool:
    """Whether two ranks, each with its part of what can be cut along ``dim``, make something else of it, or cannot be made."""
    shards = []
    for rank in range(2):
        cut = _half(dim, rank)
        try:
            shards.append(_stepped(factory, {n: cut(n, w) for n, w in whole.items()}, gradients, cut)[0])
        except _NotTriedError:
            return True
    is_cut = {name: _is_cut(weight, dim) for name, weight in whole.items()}
    steps = [joined(of_ranks, dim, is_cut) for of_ranks in zip(*shards, strict=True)]
    return any(differ(wanted[0], of, wanted[1]) for of in zip(*steps, strict=True))


def _small(parameters: Mapping[str, Tensor], *, few: bool) -> Weights:
    """``few``: two for each pattern of names and dtype, else all. Even sizes, so that two ranks have equal shards. One is large if the
    model's largest is.

    Weights in 16 bits are updated in fp32 (`masters`).
    """
    generator = torch.Generator().manual_seed(0)
    dtypes = {name: torch.promote_types(parameter.dtype, torch.float32) for name, parameter in parameters.items()}
    kept = [
        name
        for names in _by_pattern(parameters).values()
        for dtype in dict.fromkeys(dtypes[name] for name in names)
        for name in [name for name in names if dtypes[name] is dtype][: 2 if few else None]
    ]
    sizes = {name: [min(size, _SIZE) // 2 * 2 or 1 for size in parameters[name].shape] for name in kept}
    largest = max(kept, key=lambda name: (parameters[name].dim() > 1, parameters[name].numel()), default=None)
    if largest is not None and parameters[largest].numel() >= prod(_LARGE):
        dims = parameters[largest].dim()
        sizes[largest] = [prod(_LARGE)] if dims == 1 else [1] * (dims - len(_LARGE)) + list(_LARGE)
    return {name: torch.randn(shape, generator=generator, dtype=dtypes[name]) for name, shape in sizes.items()}


def _by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return found


def _halves(names: Sequence[str]) -> tuple[list[str], ...]:
    """The first and the second of each pattern, so that both have weights of each kind; every other name if no pattern has two."""
    patterns = _by_pattern(names).values()
    second = [of[1] for of in patterns if len(of) > 1]
    return ([of[0] for of in patterns], second) if second else (list(names)[::2], list(names)[1::2])


def _other_dtypes_first(weights: Weights) -> list[list[str]]:
    """As on ranks that hold no weight of the first dtype before them: Adafactor takes its eps from the first weight of a group."""
    dtypes = list(dict.fromkeys(weight.dtype for weight in weights.values()))
    return [sorted(weights, key=lambda name: weights[name].dtype is not dtype) for dtype in dtypes[1:]]


def _all_of(_: str, tensor: Tensor) -> Tensor:
    return tensor


def _stepped(
    factory: OptimizerFactory,
    weights: Weights,
    gradients: Sequence[Weights],
    part: Callable[[str, Tensor], Tensor],
    *,
    of_all: Weights | None = None,
) -> tuple[list[Trace], str]:
    """What there is after a step with each of the gradients, of which these weights have a part; and what the optimizer is called.

    ``of_all``: the weights are some of these. Raises _NotTriedError.
    """
    every = {name: nn.Parameter(weight.clone()) for name, weight in (of_all or weights).items()}
    held = {name: every[name] for name in weights}
    name, traces, kept = "the optimizer", [], False
    try:
        optimizer = optimizer_of(factory, held, every=every)
        name = type(optimizer).__name__
        _prepare(optimizer, held)
        for of in gradients:
            before = {of_name: parameter.detach().clone() for of_name, parameter in held.items()}
            for of_name, parameter in held.items():
                parameter.grad = part(of_name, of[of_name]).clone()
            _step(optimizer)
            optimizer.zero_grad()
            traces.append(trace_of(optimizer, held, before))
            stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            kept = kept or any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in stepped)
    except HeterodyneError:
        raise
    except Exception as error:
        raise _NotTriedError(name, f"on small weights it fails: {type(error).__name__}: {error}") from error
    if kept:
        raise HeterodyneError(
            f"the zero_grad of {name} keeps gradients for the next step, and a step here begins without any: take larger batches (their "
            "micro-batches are accumulated), or an optimizer that adds gradients up in its own state"
        )
    return traces, name


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Raises HeterodyneError if it steps with a closure only."""
    try:
        optimizer.step()
    except Exception as error:
        if "closure" in str(error) or _steps_with_closure(optimizer):
            raise HeterodyneError(
                f"{type(optimizer).__name__} evaluates the loss in its step, through a closure, and a step here has evaluated it before: "
                "take an optimizer whose step() needs no closure"
            ) from error
        raise


def _steps_with_closure(optimizer: torch.optim.Optimizer) -> bool:
    done = False
    with suppress(Exception):
        optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value, unused-ignore]
        done = True
    return done


def _prepare(optimizer: torch.optim.Optimizer, held: Mapping[str, nn.Parameter]) -> None:
    """Put it into train mode, if it has modes, and give it a rate at which updates show.

    Raises ValueError if it would step something else, such as the user's model.
    """
    train = getattr(optimizer, "train", None)
    if callable(train):  # as schedule-free ones have it, which refuse to step before
        train()
    given = {id(parameter) for parameter in held.values()}
    for group in optimizer.param_groups:
        if any(id(parameter) not in given for parameter in group["params"]):
            raise ValueError("it is made of other parameters than those it is given")
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            group["lr"] = rate.detach().clamp(min=_LEAST_RATE)
        elif isinstance(rate, (int, float)):
            group["lr"] = max(rate, _LEAST_RATE)


def _half(dim: int, rank: int) -> Callable[[str, Tensor], Tensor]:
    """What a rank of two holds of a tensor that is cut along ``dim``; all of it where that cannot be cut."""

    def cut(_: str, tensor: Tensor) -> Tensor:
        return tensor.chunk(2, dim)[rank] if _is_cut(tensor, dim) else tensor

    return cut


def _is_cut(tensor: Tensor, dim: int) -> bool:
    return tensor.dim() > dim and tensor.shape[dim] > 1
