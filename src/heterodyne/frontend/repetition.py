"""Which modules of a model are its repeated layers, told from its structure alone.

A *list* is a module whose children have numbers for names (ModuleList, Sequential). It repeats if two or more of its
children that hold parameters are of one class; the outermost lists that repeat hold the layers. Where the children of such a
list differ in shape and are themselves made of lists that repeat (the stages of a ResNet), the layers are one level
further in; never deeper: the experts of a layer are part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["layer_lists"]


def layer_lists(model: nn.Module) -> list[list[str]]:
    """The paths of the layers, a list for each list of modules; of top-level parts if nothing repeats."""
    lists = list(_outermost(model, ""))
    found: list[tuple[list[str], bool]] = []
    for path, module in lists:
        nested = [list(_outermost(child, name)) for name, child in _children(module, path)]
        if not _alike(module) and all(nested):
            found += [([name for name, _ in _children(inner, at)], True) for each in nested for at, inner in each]
        else:
            found.append(([name for name, _ in _children(module, path)], _alike(module)))
    # A list of like-named but unlike modules (a small classifier, say) counts only where nothing better is found.
    certain = [names for names, alike in found if alike]
    if certain or found:
        return certain or [names for names, _ in found]
    parts = _parts(model)
    return [parts] if parts else []


def _outermost(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    if _repeats(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost(child, f"{path}.{name}" if path else name)


def _children(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    return [(f"{path}.{name}" if path else name, child) for name, child in module.named_children() if _holds(child)]


def _repeats(module: nn.Module) -> bool:
    children = dict(module.named_children())
    if len(children) < 2 or not all(name.isdigit() for name in children):
        return False
    classes = [type(child) for child in children.values() if _holds(child)]
    return len(classes) > len(set(classes))


def _alike(module: nn.Module) -> bool:
    """Whether two children have the same structure and shapes."""
    signatures = [_signature(child) for child in module.children() if _holds(child)]
    return len(signatures) > len(set(signatures))


def _signature(module: nn.Module) -> tuple[Any, ...]:
    return (
        type(module),
        tuple(tuple(p.shape) for p in module.parameters(recurse=False)),
        tuple((name, _signature(child)) for name, child in module.named_children()),
    )


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _parts(model: nn.Module) -> list[str]:
    """The children of the outermost module that has several."""
    path, module = "", model
    while True:
        children = [(name, child) for name, child in module.named_children() if _holds(child)]
        if len(children) != 1 or any(True for _ in module.parameters(recurse=False)):
            return [f"{path}.{name}" if path else name for name, _ in children]
        path = f"{path}.{children[0][0]}" if path else children[0][0]
        module = children[0][1]
