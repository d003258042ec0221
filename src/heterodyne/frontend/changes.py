"""What a forward changes for the next one, which copies of a model on several devices would each change in their own way."""

from __future__ import annotations

import inspect
import re
from collections import deque
from collections.abc import Mapping, Sequence
from types import FunctionType

import torch
from torch import Tensor, fx, nn

from heterodyne.around_model import Kept, Root, kept_by
from heterodyne.errors import CaptureError
from heterodyne.frontend.arguments import argument, mutates, operator_name
from heterodyne.frontend.faults import line_of

__all__ = [
    "PLAIN",
    "Looked",
    "place_of",
    "refuse_changes",
    "refuse_kept",
    "refuse_new_buffers",
]

PLAIN = (int, float, str)
"""Types of numbers and words."""
_WHY = (
    "which the model keeps for the next forward. Each device sees only its own samples, in micro-batches of its own, so the copies would "
    "drift apart. Change it outside of forward, once a step; BatchNorm is the one exception that is known."
)


def refuse_changes(graph: fx.Graph, kept: Mapping[fx.Node, str], model: nn.Module) -> None:
    """Raise CaptureError, with the line, if forward changes a tensor that the model keeps (``kept``: its placeholders, by name).

    A device sees its own samples, in a number of micro-batches of its own, so the copies would drift apart. BatchNorm may: its
    statistics are taken over all devices, and every one of them takes the same number.
    """
    for node in graph.nodes:
        for changed in (*mutates(node), *_statistics(node)):
            name = kept.get(_base(changed))
            if name is not None and not _of_batch_norm(model, name):
                place = f"{line}\n" if (line := line_of(node, full=True)) else ""
                raise CaptureError(f"{place}forward changes {name!r}, {_WHY}{_instead(model, name)}")


def _instead(model: nn.Module, name: str) -> str:
    """Return what to write in place of the part of torch's own that keeps this tensor."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.modules.instancenorm._InstanceNorm):
        return " Without its statistics it is exact: track_running_stats=False."
    hooks = (hook for part in model.modules() for hook in part._forward_pre_hooks.values())
    if type(owner).__name__ == "_SpectralNorm" or any(type(hook).__name__ == "SpectralNorm" for hook in hooks):
        return (
            " spectral_norm takes a step of its power iteration in each forward: parametrizations.weight_norm, or a weight that is divided "
            "by torch.linalg.matrix_norm(weight, 2) in forward, is exact."
        )
    return ""


def refuse_new_buffers(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Raise CaptureError if forward put other tensors in the place of buffers, which a trace does not show."""
    for name, tensor in after.items():
        if name in before and before[name] is not tensor:
            raise CaptureError(f"forward changes {name!r} (it sets another tensor in its place), {_WHY}")


class Looked:
    """What a model keeps now (`kept_by`), to be compared with what it keeps after a forward."""

    def __init__(self, model: nn.Module, functions: Sequence[FunctionType]) -> None:
        self.kept = {place_of(kept): kept for kept in kept_by(model, functions)}
        self._lengths = {
            place: len(kept.value)
            for place, kept in self.kept.items()
            if isinstance(kept.value, list | set | dict | deque)
        }

    def changed(self, before: Looked) -> list[Kept]:
        """Return the tensors, numbers and words that are others than before; numbers without a value (torch.SymInt, ...) too."""
        return [kept for place, kept in self.kept.items() if _is_other(before.kept.get(place), kept)]

    def counted(self, before: Looked) -> list[Kept]:
        """Return the numbers and words that are others than before, but those in containers that are longer than before."""
        longer = {id(kept.value) for kept in self.longer(before)}
        return [k for k in self.changed(before) if isinstance(k.value, PLAIN) and id(k.holder) not in longer]

    def longer(self, before: Looked) -> list[Kept]:
        """Return the lists, sets and dicts that have more entries than before."""
        return [
            self.kept[place] for place, length in self._lengths.items() if length > before._lengths.get(place, length)
        ]


def place_of(kept: Kept) -> tuple[Root, str]:
    """Return what identifies the place where a value stands, whatever stands there."""
    return kept.root, kept.name


def _is_other(before: Kept | None, now: Kept) -> bool:
    value = now.value
    if isinstance(value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return before is None or before.value is not value
    if not isinstance(value, PLAIN):
        return False
    if before is None or type(before.value) is not type(value):
        return True
    return bool(before.value != value and not (before.value != before.value and value != value))


def refuse_kept(kept: Kept) -> None:
    """Raise CaptureError, with the line: what forward leaves in this place the next one reads."""
    line = "" if kept.module is None else _line_that_sets(type(kept.module), kept.attribute)
    place = f"{line}\n" if line else ""
    raise CaptureError(f"{place}forward changes {kept.name!r}, {_WHY}")


def _line_that_sets(made: type, name: str) -> str:
    """The line of a class that changes an attribute; "" if nobody knows."""
    try:
        filename, (lines, first) = inspect.getsourcefile(made), inspect.getsourcelines(made)
    except (OSError, TypeError):
        return ""
    sets = re.compile(rf"\w+\.{re.escape(name)}(\[.*\])?\s*([-+*/]|//)?=(?!=)")
    places = [number for number, text in enumerate(lines) if sets.search(text)]
    return f"{filename}:{first + places[-1]}: {lines[places[-1]].strip()}" if places else ""


def _statistics(node: fx.Node) -> list[fx.Node]:
    """Running statistics of instance norm, which its schema does not declare as changed."""
    if operator_name(node) != "instance_norm" or not argument(node, "use_input_stats"):
        return []
    return [n for n in (argument(node, "running_mean"), argument(node, "running_var")) if isinstance(n, fx.Node)]


def _base(node: fx.Node) -> fx.Node:
    """Return what a view is a view of."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    first = schema.arguments[0] if schema is not None and schema.arguments else None
    return first is not None and first.alias_info is not None and bool(node.all_input_nodes)


def _of_batch_norm(model: nn.Module, name: str) -> bool:
    owners = dict(model.named_modules())
    return isinstance(owners.get(name.rpartition(".")[0]), nn.modules.batchnorm._BatchNorm)
