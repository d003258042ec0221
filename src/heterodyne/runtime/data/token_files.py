"""Token files that the user brings: ``.npy``, or bare numbers in a ``.bin``, memory-mapped as they are."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterodyne.errors import DataError
from heterodyne.runtime.data.tokens import TokenFile
from heterodyne.text_files import require_regular

__all__ = ["open_token_file"]

_PROBE = 1 << 20


def open_token_file(path: Path, *, dtype: str = "uint16") -> TokenFile:
    """The tokens of a file: all documents one after the other, with what separates them.

    Args:
        dtype: of a ``.bin``, which does not say it; a ``.npy`` does.

    Raises DataError for a file that is not there, or is no row of whole numbers.
    """
    try:
        require_regular(path)
        size = path.stat().st_size
        if path.suffix == ".npy":
            tokens = np.lib.format.open_memmap(path, mode="r")  # unlike np.load, it takes no archive and no pickle
        elif not size or size % np.dtype(dtype).itemsize:
            raise DataError(
                f"data.tokens: {path} has {size} bytes, which is no whole number of {dtype} tokens: it was cut short, or holds others "
                "(data.token_dtype)"
            )
        else:
            tokens = np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(f"data.tokens: {path} cannot be read ({error.strerror or error}); correct the path") from error
    except ValueError as error:
        raise DataError(
            f"data.tokens: {path} has {size} bytes and is no whole .npy file: it was cut short, or is something else; write it with "
            "numpy.save"
        ) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui" or not len(tokens):
        raise DataError(
            f"data.tokens: {path} holds {tokens.dtype} {list(tokens.shape)}; give one row of whole numbers, of which there are some"
        )
    return TokenFile(path=path, tokens=tokens, digest=_digest(tokens), vocabulary=None, unit="tokens")


def _digest(tokens: NDArray[Any]) -> str:
    """Of its length and of three parts of it, for it may be too long to be read whole."""
    digest = hashlib.blake2b(f"{tokens.dtype} {len(tokens)}".encode(), digest_size=32)
    for first in (0, max(0, len(tokens) // 2), max(0, len(tokens) - _PROBE)):
        digest.update(np.ascontiguousarray(tokens[first : first + _PROBE]).tobytes())
    return digest.hexdigest()
