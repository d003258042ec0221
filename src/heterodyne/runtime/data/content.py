"""A digest of values, whatever they are made of: the same on each rank that has read the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["content_digest"]


def content_digest(value: Any) -> str:
    """Of numbers, texts, arrays and tensors, and of what holds them; of anything else its type alone."""
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, value)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, value: Any) -> None:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype.is_floating_point else value.numpy()
    digest.update(type(value).__name__.encode())
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        digest.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            _add(digest, key)
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(str(len(value)).encode())
        for entry in value:
            _add(digest, entry)
    elif isinstance(value, bytes):
        digest.update(value)
    elif value is None or isinstance(value, str | int | float | bool | np.generic):
        digest.update(repr(value).encode())
