"""What an optimizer has become after a step: the weights, its state, the options of its groups, and the numbers that it keeps elsewhere.

An update that depends on other weights shows first in what it is computed from: a running norm, a distance in the options of a group, a
buffer that belongs to no parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from heterodyne.runtime.weights.parameter_groups import options_of
from heterodyne.runtime.weights.wrapped_state import unwrapped

__all__ = ["Trace", "Weights", "differ", "draws", "joined", "trace_of"]

Weights: TypeAlias = dict[str, Tensor]
Value: TypeAlias = Tensor | bool | int | float
Path: TypeAlias = tuple[str, ...]
"""Where a value is kept. It begins with the name of the parameter that it belongs to, or with ""."""

_ERROR = 1e-4  # of the largest: rounding is far less
_ULPS = 8
_DEPTH = 4  # of objects that an optimizer keeps in its attributes
_OPTIONS = "options"
_OWN = ("state", "param_groups", "defaults")
_NOT_LOOKED_INTO = (nn.Module, type, torch.Generator, torch.dtype, torch.device)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What is there after a step. ``updates``: what the step has added to the weights; ``kept``: everything else that has a value."""

    weights: Weights
    updates: Weights
    kept: Mapping[Path, Value]


def trace_of(optimizer: torch.optim.Optimizer, held: Mapping[str, nn.Parameter], before: Weights) -> Trace:
    """Copy what there is now. ``before``: the weights before the step."""
    names = {id(parameter): name for name, parameter in held.items()}
    weights = {name: parameter.detach().clone() for name, parameter in held.items()}
    kept = {
        path: value.detach().clone() if isinstance(value, Tensor) else value for path, value in _kept(optimizer, names)
    }
    return Trace(weights=weights, updates={n: w - before[n] for n, w in weights.items()}, kept=kept)


def _kept(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[tuple[Path, Value]]:
    """The options of a group are those of each of its parameters, since another rank may have other groups."""
    for parameter, state in optimizer.state.items():
        path = _path_of(parameter, names, ("", "state"))
        yield from _values(unwrapped(state) if isinstance(state, Mapping) else state, names, path, 0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield from _values(options_of(group), names, (names.get(id(parameter), ""), _OPTIONS), 0)
    others = {key: value for key, value in vars(optimizer).items() if key not in _OWN}
    yield from _values(others, names, ("", "attributes"), 0)


def _values(held: Any, names: Mapping[int, str], path: Path, depth: int) -> Iterator[tuple[Path, Value]]:
    """All values in containers and plain objects. A sequence with an entry for each parameter is left out: its entries have no names."""
    if isinstance(held, Tensor):
        if id(held) not in names and held.layout is torch.strided:
            yield path, held
    elif isinstance(held, (bool, int, float)):
        yield path, held
    elif depth > _DEPTH or held is None or isinstance(held, (str, bytes, *_NOT_LOOKED_INTO)) or callable(held):
        return
    elif isinstance(held, torch.optim.Optimizer):
        for inner, value in _kept(held, names):
            yield (inner[0], *path[1:], *inner[1:]), value
    elif isinstance(held, Mapping):
        for key, value in list(held.items()):
            yield from _values(value, names, _path_of(key, names, path), depth + 1)
    elif isinstance(held, Sequence) or hasattr(held, "popleft"):
        if len(held) != len(names):
            for place, value in enumerate(held):
                yield from _values(value, names, (*path, f"{place} of {len(held)}"), depth + 1)
    elif hasattr(held, "__dict__"):
        yield from _values(vars(held), names, path, depth + 1)


def _path_of(key: Any, names: Mapping[int, str], path: Path) -> Path:
    """Of what stands under a key: a parameter, its ``id()``, or anything else."""
    name = names.get(key if type(key) is int else id(key))
    return (*path, str(key)) if name is None else (name, *path[1:])


def draws(first: Sequence[Trace], again: Sequence[Trace]) -> bool:
    """Whether equal steps gave other bits, in weights or in tensors of the state."""
    pairs = list(zip(first, again, strict=True))
    tensors = [(a.weights[name], b.weights[name]) for a, b in pairs for name in a.weights]
    for a, b in pairs:
        tensors += [
            (value, other)
            for path, value in a.kept.items()
            if isinstance(value, Tensor) and isinstance(other := b.kept.get(path), Tensor)
        ]
    return not all(_same_bits(a, b) for a, b in tensors)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def differ(wanted: Sequence[Trace], found: Sequence[Trace], again: Sequence[Trace]) -> bool:
    """Whether any step gave parameters another update, or left other values of what belongs to them or to none.

    ``again``: the steps of ``wanted`` once more; numbers that are others in these (seconds, say) are not compared.
    """
    return any(_step_differs(*steps) for steps in zip(wanted, found, again, strict=True))


def _step_differs(wanted: Trace, found: Trace, again: Trace) -> bool:
    for name, update in found.updates.items():
        rounding = _ULPS * torch.finfo(update.dtype).eps * _largest(wanted.weights[name])
        if not _near(wanted.updates[name], update, rounding):
            return True
    for path, value in found.kept.items():
        other = wanted.kept.get(path)
        if other is None or not _alike(other, again.kept.get(path), 0.0):
            continue
        # What belongs to a group, or to none, is the same to the last bit, unless it is made of several weights.
        own = path[0] and path[1] != _OPTIONS
        if _comparable(other, value) and not _alike(other, value, _ERROR if own else 0.0):
            return True
    return False


def _comparable(a: Value, b: Value) -> bool:
    """Codes of a state in few bits may round otherwise."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return isinstance(a, Tensor) == isinstance(b, Tensor)
    return a.shape == b.shape and (a.is_floating_point() or a.numel() == 1)


def _alike(a: Value, b: Value | None, error: float) -> bool:
    if b is None:
        return False
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and _near(a, b, 0.0, error)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return a == b or (a != a and b != b) or abs(a - b) <= error * max(abs(a), abs(b))


def _near(a: Tensor, b: Tensor, rounding: float, error: float = _ERROR) -> bool:
    """What is not a number in both is the same, as at a rate that is not a number."""
    same = (a == b) | (a.isnan() & b.isnan())
    return bool(same.all()) or bool((((a - b).abs() <= error * _largest(a) + rounding) | same).all())


def _largest(of: Tensor) -> float:
    return float(of.detach().nan_to_num().abs().max()) if of.numel() else 0.0


def joined(shards: Sequence[Trace], dim: int, cut: Mapping[str, bool]) -> list[Trace]:
    """What two ranks make of it together, which is compared with a step of whole weights: first what both have parts of, then what each
    has by itself. ``cut``: of each parameter whether it is cut along ``dim``.
    """

    def together(parts: Sequence[Weights]) -> Weights:
        return {n: torch.cat([of[n] for of in parts], dim) if cut[n] else parts[0][n] for n in cut}

    whole = Trace(
        weights=together([of.weights for of in shards]), updates=together([of.updates for of in shards]), kept={}
    )
    kept: list[dict[Path, Value]] = [{}, {}]
    for path, value in shards[0].kept.items():
        pair = (value, shards[1].kept.get(path))
        parts = [of for of, rank in zip(pair, shards, strict=True) if _is_like(of, rank.weights.get(path[0]))]
        if cut.get(path[0]) and len(parts) == len(pair):
            kept[0][path] = torch.cat(parts, dim)
        else:
            kept[0][path] = value
            if pair[1] is not None:
                kept[1][path] = pair[1]
    return [Trace(weights=whole.weights, updates=whole.updates, kept=of) for of in kept]


def _is_like(value: Value | None, weight: Tensor | None) -> TypeGuard[Tensor]:
    """Whether it has an entry for each element of a weight."""
    return isinstance(value, Tensor) and weight is not None and value.shape == weight.shape
