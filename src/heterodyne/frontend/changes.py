"""What a forward changes for the next one, which copies of a model on several devices would each change in their own way."""

from __future__ import annotations

import inspect
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping

from torch import Tensor, fx, nn

from heterodyne.errors import CaptureError
from heterodyne.frontend.arguments import argument, mutates, operator_name
from heterodyne.frontend.faults import line_of

__all__ = [
    "changed_numbers",
    "entry_name",
    "kept_in",
    "numbers_of",
    "refuse_changes",
    "refuse_counters",
    "refuse_kept",
    "refuse_new_buffers",
]

_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_MOST_KEPT = 100
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
    """What to write in place of the part of torch's own that keeps this tensor."""
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


def numbers_of(model: nn.Module) -> dict[tuple[str, str], object]:
    """The numbers and words that its modules keep as attributes, or in lists and dicts there, by the path of the module and the name."""
    return {
        (path, entry_name(attribute, key)): value
        for path, module in model.named_modules()
        for attribute, key, value in kept_in(module)
        if isinstance(value, int | float | str)
    }


def entry_name(attribute: str, key: object) -> str:
    """Return the name of what `kept_in` yields: ``calls``, ``state['calls']``, ``state[0]``."""
    return attribute if key is None else f"{attribute}[{key!r}]"


def kept_in(module: nn.Module) -> Iterator[tuple[str, object, object]]:
    """Yield what a module keeps besides parameters, buffers and modules: the attribute, the key or index in it (None: it is the value
    itself), and the value.
    """
    for attribute, kept in vars(module).items():
        if attribute in _OF_MODULES:
            continue
        if isinstance(kept, dict):
            yield from ((attribute, key, value) for key, value in list(kept.items())[:_MOST_KEPT])
        elif isinstance(kept, list | tuple | deque):
            yield from ((attribute, place, value) for place, value in enumerate(list(kept)[:_MOST_KEPT]))
        else:
            yield attribute, None, kept


def changed_numbers(
    before: Mapping[tuple[str, str], object], after: Mapping[tuple[str, str], object]
) -> list[tuple[str, str]]:
    """Those that are new or others (`numbers_of`)."""
    return [key for key, value in after.items() if key not in before or _are_others(before[key], value)]


def refuse_counters(model: nn.Module, changed: Collection[tuple[str, str]], run: Callable[[], object]) -> None:
    """Raise CaptureError, with the line, if each forward changes a plain attribute. What only the first one sets (a cache) may be.

    Args:
        changed: the attributes that a forward has changed.
        run: runs a forward.
    """
    if not changed:
        return
    run()
    first = numbers_of(model)
    run()
    second = numbers_of(model)
    for path, name in changed:
        if _are_others(first.get((path, name)), second.get((path, name))):
            refuse_kept(model, path, name)


def refuse_kept(model: nn.Module, path: str, name: str) -> None:
    """Raise CaptureError, with the line: what forward leaves in this attribute the next one reads."""
    place = f"{line}\n" if (line := _line_that_sets(type(model.get_submodule(path)), name)) else ""
    raise CaptureError(f"{place}forward changes {f'{path}.{name}' if path else name!r}, {_WHY}")


def _are_others(before: object, after: object) -> bool:
    """NaN is none but itself."""
    return bool(before != after) and not (before != before and after != after)


def _line_that_sets(made: type, name: str) -> str:
    """The line of a class that changes an attribute; "" if nobody knows."""
    try:
        filename, (lines, first) = inspect.getsourcefile(made), inspect.getsourcelines(made)
    except (OSError, TypeError):
        return ""
    sets = re.compile(rf"\w+\.{re.escape(name.partition('[')[0])}(\[.*\])?\s*([-+*/]|//)?=(?!=)")
    places = [number for number, text in enumerate(lines) if sets.search(text)]
    return f"{filename}:{first + places[-1]}: {lines[places[-1]].strip()}" if places else ""


def _statistics(node: fx.Node) -> list[fx.Node]:
    """Running statistics of instance norm, which its schema does not declare as changed."""
    if operator_name(node) != "instance_norm" or not argument(node, "use_input_stats"):
        return []
    return [n for n in (argument(node, "running_mean"), argument(node, "running_var")) if isinstance(n, fx.Node)]


def _base(node: fx.Node) -> fx.Node:
    """What a view is a view of."""
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
