"""Traces of Transformers' attention without the masks that a run of the model does without.

A causal mask without padding is an argument of PyTorch's attention (``is_causal``), and only without a mask does it take flash kernels.
Transformers leaves such a mask out when a model runs, and builds it under torch.export, since a graph may later meet other lengths
(https://github.com/pytorch/pytorch/issues/108108). Graphs here have fixed lengths: another length is captured anew.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["as_in_a_run"]


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
    """Whether nothing is masked, or only the future of each token; the conditions of Transformers' own ``sdpa_mask``."""
    sizes = (q_length, kv_length, q_offset, kv_offset)
    if attention_mask is not None or not all(isinstance(size, int) for size in sizes):
        return False
    if local_size is not None and kv_length >= local_size:
        return False
    causal = allow_is_causal_skip and q_offset == kv_offset and q_length in (1, kv_length)
    return causal or allow_is_bidirectional_skip
