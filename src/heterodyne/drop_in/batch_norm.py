"""BatchNorm of the user's modules over all samples of the global batch, forward and backward.

Hooks of each BatchNorm turn `GlobalBatchNorm` on while its forward runs, also where checkpointing runs it again in the backward. The
modules stay what they are; copies and pickles of them do without.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from heterodyne.runtime.exact.batch_norm import GlobalBatchNorm

__all__ = ["batch_norms_of", "join_batch_norms", "leave_batch_norms", "without_sync"]


class _Around:
    """The hooks of one BatchNorm. Without a ``norm`` they do nothing."""

    def __init__(self, norm: GlobalBatchNorm | None) -> None:
        self._norm = norm
        self._on: list[bool] = []

    def begin(self, module: nn.Module, inputs: Any) -> None:
        del inputs
        on = self._norm is not None and module.training
        self._on.append(on)
        if on and self._norm is not None:
            self._norm.__enter__()  # type: ignore[no-untyped-call]

    def end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs, output
        if self._on.pop() and self._norm is not None:
            self._norm.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Around:
        del memo
        return _Around(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Around, (None,)


class _OfAnyInput(_BatchNorm):
    """A BatchNorm that takes any number of dimensions, as SyncBatchNorm does."""

    def _check_input_dim(self, input: Any) -> None:
        del input


def batch_norms_of(module: nn.Module) -> list[nn.Module]:
    """All BatchNorm modules in a module."""
    return [part for part in module.modules() if isinstance(part, _BatchNorm)]


def join_batch_norms(module: nn.Module, norm: GlobalBatchNorm) -> None:
    """Let each BatchNorm in ``module`` take its statistics, in training, from ``norm`` alone."""
    leave_batch_norms(module)
    for part in batch_norms_of(module):
        around = _Around(norm)
        part.register_forward_pre_hook(around.begin)
        part.register_forward_hook(around.end, always_call=True)


def leave_batch_norms(module: nn.Module) -> None:
    """Let each BatchNorm in ``module`` take its statistics from its own input again."""
    for part in batch_norms_of(module):
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for number, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), _Around):
                    del hooks[number]
                    part._forward_hooks_always_called.pop(number, None)


def without_sync(module: nn.Module) -> None:
    """Put a BatchNorm with the same weights and buffers in the place of each SyncBatchNorm, whose backward counts all ranks alike."""
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.SyncBatchNorm):
                if child not in made:
                    made[child] = _OfAnyInput(child.num_features)
                    made[child].__dict__.update(child.__dict__)
                setattr(parent, name, made[child])
