"""A trace goes the ways of a run: past checks of values, without masks that a run does without, through sets of words in one order.

``torch.distributions`` and `torch.nn.functional.gaussian_nll_loss` look whether their arguments are valid, and raise if not. A trace has
no values, so it goes on as if they passed. Where the module itself runs, its checks run too.
"""

from __future__ import annotations

import builtins
import contextlib
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from heterodyne.eager import without_overrides
from heterodyne.frontend.faults import is_foreign

__all__ = ["OwnChecks", "as_in_a_run", "ordered_word_sets"]


class OwnChecks(TorchFunctionMode):
    """While active, an ``if`` of torch's own on a tensor, behind which it would raise, goes the way in which it does not."""

    def __torch_function__(  # type: ignore[no-untyped-def]  # as torch declares it
        self, func, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__bool__ and (passes := _passes(sys._getframe(1))) is not None:
            return passes
        if func is F.gaussian_nll_loss:
            with self:
                return without_overrides(func)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _passes(frame: FrameType | None) -> bool | None:
    """The value of a condition with which a line of torch does not raise; None if it is no check."""
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is None or not is_foreign(frame.f_code.co_filename):
        return None
    condition, *following = (
        line.strip() for line in linecache.getlines(frame.f_code.co_filename)[frame.f_lineno - 1 :]
    )
    behind = next((line for line in following if line), "")
    condition = condition.removeprefix("el")
    if not condition.startswith("if ") or not condition.endswith(":") or not behind.startswith("raise "):
        return None
    return condition.startswith("if not ")


# Traces in which a set that the model's code makes has one order.
#
# Python orders a set of words in another way in each process, and a forward that goes through one, as
# ``for kind in set(config.layer_types)``, computes in that order: the ranks would capture other graphs, and the next run other ones again.
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


# Traces of Transformers' attention without the masks that a run of the model does without.
#
# A causal mask without padding is an argument of PyTorch's attention (``is_causal``), and only without a mask does it take flash kernels.
# Transformers leaves such a mask out when a model runs, and builds it under torch.export, since a graph may later meet other lengths
# (https://github.com/pytorch/pytorch/issues/108108). Graphs here have fixed lengths: another length is captured anew.
@contextlib.contextmanager
def as_in_a_run() -> Iterator[None]:
    """Traces inside have the masks of a run. Where Transformers is not loaded, no model of it is traced."""
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return
    masks = masking.ALL_MASK_ATTENTION_FUNCTIONS
    before = masks["sdpa"]
    registered = before is masking.AttentionMaskInterface()["sdpa"]

    def mask(*args: Any, **options: Any) -> Tensor | None:
        if _needless(**options):
            return None
        made: Tensor | None = before(*args, **options)
        return made

    masks["sdpa"] = mask
    try:
        yield
    finally:
        if registered:
            del masks["sdpa"]
        else:
            masks["sdpa"] = before


def _needless(
    *,
    q_length: Any = None,
    kv_length: Any = None,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Callable[..., object],
) -> bool:
    """Return whether nothing is masked, or only the future of each token; the conditions of Transformers' own ``sdpa_mask``."""
    sizes = (q_length, kv_length, q_offset, kv_offset)
    if attention_mask is not None or not all(isinstance(size, int) for size in sizes):
        return False
    if local_size is not None and kv_length >= local_size:
        return False
    causal = allow_is_causal_skip and q_offset == kv_offset and q_length in (1, kv_length)
    return causal or allow_is_bidirectional_skip
