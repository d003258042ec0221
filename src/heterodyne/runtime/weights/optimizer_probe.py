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
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from heterodyne.errors import HeterodyneError
from heterodyne.runtime.weights.optimizer import OptimizerFactory, optimizer_of

__all__ = ["Reach", "reach_of"]

Reach: TypeAlias = Literal["element", "weight", "model"]
"""What the update of an element may depend on."""

_SIZE = 4
_LARGE = (2, 33 * 128)
"""Of one weight, so that state that is kept in blocks shows: 8-bit optimizers quantize 256 values at a time, of weights of 4,096 elements
and more (torchao, bitsandbytes). Both halves of this one are that large, and end in the middle of a block."""
_SCALES = (1e-5, 1.0, 1e3)  # so that what stands below an eps does, and what is only clipped above some norm is clipped
_ERROR = 1e-4
_LEAST_RATE = 1e-3  # with a smaller one, or 0 as before a warm-up, rounding hides how the update is made

Weights: TypeAlias = dict[str, Tensor]


class _NotTriedError(HeterodyneError):
    """It cannot be made or stepped."""


def reach_of(factory: OptimizerFactory, parameters: Mapping[str, Tensor]) -> tuple[Reach, str]:
    """The reach of the optimizer that a factory makes of these parameters, and what the optimizer is called.

    It is made of parameters of the same names and numbers of dims with at most 4 elements a dim, two for each pattern of names
    (``layers.#.weight``), one of them larger where the model has a large one, and stepped three times with random gradients: all together,
    each half of them by itself, with each dtype first, and as the shards of two ranks along each dim. Compiled steps run as Python. One
    that cannot be tried is taken to need the whole model.

    Couplings that only show in still larger weights (a norm beyond the scales that are tried) are not seen.

    Raises HeterodyneError for an optimizer that needs a closure to step, draws random numbers, or keeps gradients from step to step.
    """
    whole = _small(parameters)
    with torch.random.fork_rng([]), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        gradients = [{n: scale * torch.randn(w.shape, dtype=w.dtype) for n, w in whole.items()} for scale in _SCALES]
        try:
            together, name = _stepped(factory, whole, gradients, lambda _, w: w)
        except _NotTriedError as error:
            return "model", str(error)
        # The generators of torch are further on now.
        if not _equal(whole, together, _stepped(factory, whole, gradients, lambda _, w: w)[0]):
            raise HeterodyneError(
                f"the step of {name} draws random numbers, so replicas of a weight would drift apart: add the noise to the loss or "
                "to the data, or take an optimizer without it"
            )
        if all(torch.equal(weight, together[n]) for n, weight in whole.items()):
            return "model", f"{name} (tried on small weights it moves none of them)"
        for part in (*_halves(list(whole)), *_other_dtypes_first(whole)):
            try:
                alone, _ = _stepped(factory, {n: whole[n] for n in part}, gradients, lambda _, w: w)
            except _NotTriedError:
                continue  # that it cannot be made there would be told where a stage has no more
            if not _equal(whole, together, alone):
                return "model", name
        for dim in range(max((w.dim() for w in whole.values()), default=0)):
            shards = []
            for rank in range(2):
                cut = _half(dim, rank)
                own = {n: cut(n, w) for n, w in whole.items()}
                try:
                    shards.append(_stepped(factory, own, gradients, cut)[0])
                except _NotTriedError:
                    return "weight", name
            joined = {n: _joined(w, dim, [shard[n] for shard in shards]) for n, w in whole.items()}
            if not _equal(whole, together, joined):
                return "weight", name
    return "element", name


def _small(parameters: Mapping[str, Tensor]) -> Weights:
    """Two for each pattern of names and dtype; even sizes, so that two ranks have equal shards. One is large if the model's largest is.

    Weights in 16 bits are updated in fp32 (`masters`).
    """
    generator = torch.Generator().manual_seed(0)
    dtypes = {name: torch.promote_types(parameter.dtype, torch.float32) for name, parameter in parameters.items()}
    kept = [
        name
        for names in _by_pattern(parameters).values()
        for dtype in dict.fromkeys(dtypes[name] for name in names)
        for name in [name for name in names if dtypes[name] is dtype][:2]
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


def _stepped(
    factory: OptimizerFactory,
    weights: Weights,
    gradients: Sequence[Weights],
    part: Callable[[str, Tensor], Tensor],
) -> tuple[Weights, str]:
    """The weights after a step with each of the gradients, of which these have a part; and what the optimizer is called."""
    held = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    name, kept = "the optimizer", False
    try:
        optimizer = optimizer_of(factory, held)
        name = type(optimizer).__name__
        _prepare(optimizer, held)
        for of in gradients:
            for of_name, parameter in held.items():
                parameter.grad = part(of_name, of[of_name]).clone()
            _step(optimizer)
            optimizer.zero_grad()
            stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            kept = kept or any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in stepped)
    except HeterodyneError:
        raise
    except Exception as error:
        raise _NotTriedError(f"{name} (tried on small weights it fails: {type(error).__name__}: {error})") from error
    if kept:
        raise HeterodyneError(
            f"the zero_grad of {name} keeps gradients for the next step, and a step here begins without any: take larger batches (their "
            "micro-batches are accumulated), or an optimizer that adds gradients up in its own state"
        )
    return {of_name: parameter.detach() for of_name, parameter in held.items()}, name


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
    """A rate at which updates show. Raises ValueError if it would step something else, such as the user's model."""
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


def _joined(whole: Tensor, dim: int, shards: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(shards), dim) if _is_cut(whole, dim) else shards[0]


def _is_cut(tensor: Tensor, dim: int) -> bool:
    return tensor.dim() > dim and tensor.shape[dim] > 1


def _equal(before: Weights, wanted: Weights, found: Weights) -> bool:
    """Whether the updates are equal, but for rounding; what is not a number in both is."""
    return all(_near(wanted[name] - before[name], weight - before[name]) for name, weight in found.items())


def _near(a: Tensor, b: Tensor) -> bool:
    neither = a.isnan() & b.isnan()  # of a rate that is not a number
    bar = _ERROR * a.nan_to_num().abs().max() if a.numel() else 0.0
    return bool((((a - b).abs() <= bar) | neither).all())
