"""What a model does in its backward that a graph of its forward does not show, so that only the module itself trains as it should.

Plans that run pieces of the graph (stages, split stages, recomputed blocks) would leave it out. Data parallelism runs the module
as it is: a custom backward, or a hook on the gradients of activations, sees there what it sees on one device, for a part of the samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from heterodyne.errors import NoGraphError
from heterodyne.frontend.faults import line_now
from heterodyne.graph import ModuleOnly

__all__ = ["BackwardWatch", "hooks_of"]

_MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


class BackwardWatch(TorchFunctionMode):
    """Notes, while a forward runs, what it arranges for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, ModuleOnly] = {}
        self.flows = True  # until a loss is seen through which no gradient flows

    def __torch_function__(  # type: ignore[no-untyped-def]  # as torch declares it
        self, func, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("register_hook", "register_post_accumulate_grad_hook"):
            self._note(f"forward calls Tensor.{name}", line_now())
        elif name == "grad" and getattr(func, "__module__", "") == "torch.autograd":
            line, what = (
                line_now(),
                "forward takes a gradient (torch.autograd.grad), and no graph of a forward holds a backward",
            )
            raise NoGraphError("\n".join(filter(None, [line, f"{what}."])), reason=f"{line} ({what})" if line else what)
        elif name == "batch_norm" and _is_checkpointed() and _trains(args, kwargs or {}):
            self._note(
                "BatchNorm in torch.utils.checkpoint counts its batch again in the backward; plans choose by themselves what is recomputed",
                line_now(),
            )
        return func(*args, **(kwargs or {}))

    def look_at(self, loss: Tensor) -> None:
        """Note the custom autograd functions that the gradient of a loss goes through, and whether there is such a gradient."""
        self.flows = loss.requires_grad
        seen: set[Any] = set()
        left: list[Any] = [loss.grad_fn]
        while left:
            function = left.pop()
            if function is None or function in seen:
                continue
            seen.add(function)
            left += [source for source, _ in function.next_functions]
            # An operator with a registered gradient (torch.library) is one op of the graph, with its backward.
            made = getattr(function, "_forward_cls", None)
            custom = isinstance(function, BackwardCFunction) and made is not BackwardHookFunction
            if custom and made is not None and not made.__name__.startswith("GeneratedBackwardFor_"):
                self._note(f"{made.__name__} is an autograd.Function with a backward of its own", _line_of(made))

    def _note(self, what: str, source: str) -> None:
        self.noted.setdefault(f"{what} {source}", ModuleOnly(what=what, source=source))


def _is_checkpointed() -> bool:
    """Return whether what runs now is run once more by `torch.utils.checkpoint` in the backward."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__


def _trains(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of `F.batch_norm` or `torch.batch_norm` takes statistics of its batch: the sixth argument of both."""
    return bool(kwargs.get("training", args[5] if len(args) > 5 else False))


def hooks_of(model: nn.Module) -> Iterator[ModuleOnly]:
    """The backward hooks of a model's modules."""
    for name, module in model.named_modules():
        for kind in _MODULE_HOOKS:
            for hook in getattr(module, kind).values():
                yield ModuleOnly(what=f"{name or type(module).__name__!r} has a backward hook", source=_line_of(hook))


def _line_of(made: type | Callable[..., object]) -> str:
    """Return where a class or a function begins; "" if that is not known."""
    try:
        filename, (lines, number) = inspect.getsourcefile(made), inspect.getsourcelines(made)
    except (OSError, TypeError):
        return ""
    return f"{filename}:{number}: {lines[0].strip()}"
