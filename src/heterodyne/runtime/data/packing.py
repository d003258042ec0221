"""Documents packed into rows of one length, nothing filled up and nothing dropped but the end of the last row.

The documents are one long row of tokens, which is cut every T of them: a row may begin in the middle of one document and end
in the middle of another. What separates documents (an end-of-sequence token) is part of them. ``labels`` equal ``input_ids``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heterodyne.errors import DataError
from heterodyne.runtime.data.dataset import MapDataset, length_of

__all__ = ["PackedRows", "row_of", "tokens_of"]

Tokens = NDArray[np.int64]


class PackedRows:
    """The rows of a map-style dataset of documents, as a map-style dataset: any row can be asked for.

    Args:
        documents: each a sequence of token ids, or a mapping with ``input_ids``.
        lengths: tokens of each; None: all documents are read once to find out.
        length: T, tokens of a row.

    Raises DataError if there are too few tokens for one row; `__getitem__` if a document has not the length that was given.
    """

    def __init__(self, documents: MapDataset, length: int, lengths: Sequence[int] | None = None) -> None:
        if lengths is None:
            lengths = [len(tokens_of(documents[index])) for index in range(length_of(documents))]
        self._documents = documents
        self._length = length
        self._ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
        total = int(self._ends[-1]) if len(self._ends) else 0
        if total < length:
            raise DataError(
                f"the documents have {total} tokens, one packed row needs {length}: give more or shorter rows"
            )

    def __len__(self) -> int:
        return int(self._ends[-1]) // self._length

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        first, stop = row * self._length, (row + 1) * self._length
        index = int(np.searchsorted(self._ends, first, side="right"))
        parts: list[Tokens] = []
        while first < stop:
            begin = int(self._ends[index - 1]) if index else 0
            end = int(self._ends[index])
            if end > begin:
                tokens = tokens_of(self._documents[index])
                if len(tokens) != end - begin:
                    raise DataError(
                        f"document {index} has {len(tokens)} tokens, its length was given as {end - begin}: correct the lengths"
                    )
                parts.append(tokens[first - begin : stop - begin])
                first = min(stop, end)
            index += 1
        return row_of(np.concatenate(parts))


def tokens_of(document: Any) -> Tokens:
    """The token ids of a document.  # int64 [tokens]. Raises DataError if it has none."""
    ids = document.get("input_ids") if isinstance(document, Mapping) else document
    tokens = np.asarray(ids)
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "ui"):
        raise DataError(
            f"a document to pack is a sequence of token ids or has them as input_ids; this one is a {type(document).__name__}"
        )
    return tokens.astype(np.int64)


def row_of(tokens: Tokens) -> dict[str, Tensor]:
    """A sample of these tokens."""
    ids = torch.from_numpy(tokens)
    return {"input_ids": ids, "labels": ids.clone()}
