"""The graph cut into blocks: contiguous runs of ops, one for each repeated layer, and what stands around them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from heterodyne.frontend.arguments import operator_name
from heterodyne.frontend.describe import differentiable, producer_of
from heterodyne.frontend.export import Traced
from heterodyne.frontend.flat_graph import region_of, tensors_of
from heterodyne.frontend.replay import Observed
from heterodyne.frontend.sizes import size_of, spec_of
from heterodyne.graph import Block

__all__ = ["find_blocks"]


@dataclass(kw_only=True)
class _Run:
    """Ops ``[start, stop)`` of one layer, or of a part of it; ``layer`` is "" between layers. ``family`` numbers the list of the layer."""

    layer: str
    family: int
    start: int
    stop: int


def find_blocks(traced: Traced, observed: dict[fx.Node, Observed]) -> tuple[Block, ...]:
    """Blocks in order, covering all ops, with unique names; those of one kind are interchangeable."""
    runs = [part for run in _merge_strays(_runs(traced), traced) for part in _at_experts(run, traced)]
    names = _names(runs, traced)
    return tuple(
        Block(index=index, name=name, kind=_kind(traced, observed, run.start, run.stop), start=run.start, stop=run.stop)
        for index, (run, name) in enumerate(zip(runs, names, strict=True))
    )


def _runs(traced: Traced) -> list[_Run]:
    """Maximal runs of ops of one layer, and of ops of none."""
    families = _layer_lists(traced.model)
    family_of = {name: number for number, names in enumerate(families) for name in names}
    runs: list[_Run] = []
    for position, node in enumerate(traced.ops):
        layer = _layer(traced.module_of(node), family_of)
        if runs and runs[-1].layer == layer:
            runs[-1].stop = position + 1
        else:
            runs.append(_Run(layer=layer, family=family_of.get(layer, -1), start=position, stop=position + 1))
    return runs


def _layer(path: str, layers: dict[str, int]) -> str:
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        if prefix in layers:
            return prefix
    return ""


def _merge_strays(runs: list[_Run], traced: Traced) -> list[_Run]:
    """Ops between two layers go with the layer before them, unless they hold parameters; one layer's runs become one."""
    merged: list[_Run] = []
    for position, run in enumerate(runs):
        last = merged[-1] if merged else None
        between = 0 < position < len(runs) - 1 and not run.layer
        if (
            last is not None
            and last.layer
            and (last.layer == run.layer or (between and not _reads_parameters(traced, run)))
        ):
            last.stop = run.stop
        else:
            merged.append(run)
    return merged


def _at_experts(run: _Run, traced: Traced) -> list[_Run]:
    """A layer, cut before and behind each mixture of experts.

    Devices differ in what they are good at: experts are measured by themselves, and may be elsewhere than the rest.
    """
    positions = range(run.start, run.stop) if run.layer else range(0)
    experts = [position for position in positions if operator_name(traced.ops[position]) == "experts"]
    borders = sorted({run.start, run.stop, *experts, *(position + 1 for position in experts)})
    return [
        replace(
            run, start=start, stop=stop, layer=traced.module_of(traced.ops[start]) if start in experts else run.layer
        )
        for start, stop in pairwise(borders)
    ]


def _reads_parameters(traced: Traced, run: _Run) -> bool:
    return any(
        _parameter(traced, source) for node in traced.ops[run.start : run.stop] for source in node.all_input_nodes
    )


def _parameter(traced: Traced, node: fx.Node) -> bool:
    role = traced.roles.get(node)
    return role is not None and role.kind == "parameter"


def _names(runs: list[_Run], traced: Traced) -> list[str]:
    plain = []
    for position, run in enumerate(runs):
        looks_up = any(operator_name(node) == "embedding" for node in traced.ops[run.start : run.stop])
        if run.layer:
            plain.append(run.layer)
        elif position == 0:
            plain.append("embedding" if looks_up else "stem" if len(runs) > 1 else "model")
        elif position == len(runs) - 1:
            plain.append("head")
        else:
            plain.append("embedding" if looks_up else "between")
    count: Counter[str] = Counter()
    names = []
    for name in plain:
        count[name] += 1
        names.append(name if count[name] == 1 else f"{name}#{count[name]}")
    return names


def _kind(traced: Traced, observed: dict[fx.Node, Observed], start: int, stop: int) -> str:
    """A hash of what the ops do, not of what they are called: operators, constants, shapes, and which of them feeds which.

    What comes from outside the block counts by its shape, dtype and whether gradients flow back to it.
    """
    inside = {node: position for position, node in enumerate(traced.ops[start:stop])}
    outside: dict[fx.Node, int] = {}
    content: list[Any] = []

    def stand_for(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value in inside:
                return ["op", inside[value]]
            producer = producer_of(value)
            if producer in inside:
                return ["output", inside[producer], value.args[1]]
            if not tensors_of(value):
                return ["size", _number(value.meta.get("val"))]
            first = value not in outside
            number = outside.setdefault(value, len(outside))
            return ["outside", number, *(_outside(traced, observed, value) if first else ())]
        if isinstance(value, list | tuple):
            return [stand_for(v) for v in value]
        if isinstance(value, torch.device):
            return "device"
        return _number(value)

    for node in inside:
        leaves = any(user not in inside and producer_of(user) not in inside for user in _final_users(node))
        content.append(
            [str(node.target), stand_for(node.args), {k: stand_for(v) for k, v in sorted(node.kwargs.items())},
             [spec_of(t) for t in tensors_of(node)], region_of(node), leaves]
        )  # fmt: skip
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _outside(traced: Traced, observed: dict[fx.Node, Observed], node: fx.Node) -> list[Any]:
    role = traced.roles.get(node)
    kind = role.kind if role else "value"
    return [kind, differentiable(traced, observed, node), *(spec_of(tensor) for tensor in tensors_of(node))]


def _final_users(node: fx.Node) -> list[fx.Node]:
    """Return who reads a node's tensors, through the choice of one of several outputs."""
    users = []
    for user in node.users:
        users += _final_users(user) if producer_of(user) is not user else [user]
    return users


def _number(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return size_of(value)
    if isinstance(value, Tensor):
        return spec_of(value)
    return value


# Which modules of a model are its repeated layers, told from its structure alone.
#
# A *list* is a module whose children have numbers for names (ModuleList, Sequential). It repeats if two or more of its
# children that hold parameters are of one class; the outermost lists that repeat hold the layers. Where the children of such a
# list differ in shape and are themselves made of lists that repeat (the stages of a ResNet), the layers are one level
# further in; never deeper: the experts of a layer are part of it.
def _layer_lists(model: nn.Module) -> list[list[str]]:
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
    """Return whether two children have the same structure and shapes."""
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
