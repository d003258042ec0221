"""Traces in which a set that the model's code makes has one order.

Python orders a set of words in another way in each process, and a forward that goes through one, as
``for kind in set(config.layer_types)``, computes in that order: the ranks would capture other graphs, and the next run other ones again.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from heterodyne.frontend.faults import is_foreign

__all__ = ["ordered_word_sets"]


class _LikeSet(type):
    """Code that asks for a set means any."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, builtins.set)


class _Ordered(builtins.set[Any], metaclass=_LikeSet):
    """A set that is gone through in the order of its words; what holds other things too has Python's."""

    def __iter__(self) -> Iterator[Any]:
        entries = list(super().__iter__())
        return iter(sorted(entries) if all(isinstance(entry, str) for entry in entries) else entries)


@contextlib.contextmanager
def ordered_word_sets(model: nn.Module) -> Iterator[None]:
    """Inside, ``set(...)`` in the files of the classes of a model's modules makes one that is gone through in order."""
    files = [sys.modules.get(name) for name in sorted(_files_of(model))]
    changed = [vars(file) for file in files if file is not None and "set" not in vars(file)]
    for names in changed:
        names["set"] = _Ordered
    try:
        yield
    finally:
        for names in changed:
            del names["set"]


def _files_of(model: nn.Module) -> builtins.set[str]:
    classes = {made for module in model.modules() for made in type(module).__mro__}
    return {
        made.__module__
        for made in classes
        if made.__module__ != "builtins"
        and not is_foreign(getattr(sys.modules.get(made.__module__), "__file__", None) or "")
    }
