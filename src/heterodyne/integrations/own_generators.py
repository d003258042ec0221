"""Generators of random numbers that datasets and collators keep for themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from heterodyne.code_read import is_filled

__all__ = ["unchanged_generators"]

_DEEPEST = 4
_MOST_ENTRIES = 64  # longer lists hold data


@contextmanager
def unchanged_generators(*roots: Any) -> Iterator[None]:
    """Give each generator that is found in the attributes of these objects the state again that it has now."""
    with ExitStack() as restored:
        for root in roots:
            for generator in _found(root, _DEEPEST, set()):
                restored.callback(_restoring(generator))
        yield


def _restoring(generator: Any) -> Any:
    """Return what brings a generator back to its present state."""
    if isinstance(generator, random.Random):
        now = generator.getstate()
        return lambda: generator.setstate(now)
    if isinstance(generator, np.random.Generator):
        of_bits = generator.bit_generator.state
        return lambda: setattr(generator.bit_generator, "state", of_bits)
    if isinstance(generator, np.random.RandomState):
        legacy = generator.get_state()
        return lambda: generator.set_state(legacy)
    words = generator.get_state()
    return lambda: generator.set_state(words)


def _found(holder: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if id(holder) in seen or depth < 0 or isinstance(holder, (torch.Tensor, np.ndarray, type, str, bytes)):
        return
    seen.add(id(holder))
    if isinstance(holder, (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)):
        yield holder
        return
    for entry in _entries(holder):
        yield from _found(entry, depth - 1, seen)


def _entries(holder: Any) -> list[Any]:
    """Return what an object refers to: attributes, entries, and the variables that a function closes over."""
    if isinstance(holder, Mapping):
        return list(holder.values()) if len(holder) <= _MOST_ENTRIES else []
    if isinstance(holder, (list, tuple, set)):
        return list(holder) if len(holder) <= _MOST_ENTRIES else []
    found = list(vars(holder).values()) if hasattr(holder, "__dict__") else []
    found += [cell.cell_contents for cell in getattr(holder, "__closure__", None) or () if is_filled(cell)]
    bound = getattr(holder, "__self__", None)
    return [*found, *getattr(holder, "args", ()), bound] if callable(holder) else found
