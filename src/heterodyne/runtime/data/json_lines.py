"""Documents in JSON lines: one object a line, the text in one of its fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heterodyne.errors import DataError
from heterodyne.json_files import parse_json
from heterodyne.runtime.data.corpus import Source
from heterodyne.text_files import open_regular, read_text

__all__ = ["JsonLines", "PaddedDocuments", "TextFiles"]

_LONGEST = 2**28


@dataclass(frozen=True, kw_only=True, eq=False)
class TextFiles:
    """Each file is a document."""

    sources: Sequence[Source]

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> str:
        path = self.sources[index].path
        try:
            return read_text(path, most_bytes=2**30, errors="replace")
        except OSError as error:
            raise DataError(f"data.text: {path} cannot be read ({error.strerror})") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class JsonLines:
    """Each line that is not empty is a document; they are found by number, so that no file is held in memory.

    Args:
        field: which holds the text.
    """

    sources: Sequence[Source]
    field: str

    @cached_property
    def _places(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """File, byte and line of each document."""
        found: list[tuple[int, int, int]] = []
        for number, source in enumerate(self.sources):
            begin = 0
            with open_regular(source.path) as file:
                for line, content in enumerate(iter(partial(file.readline, _LONGEST + 1), b""), 1):
                    if len(content) > _LONGEST:
                        raise DataError(
                            f"{source.path}:{line}: this line has more than {_LONGEST:,} bytes: a document is a line"
                        )
                    if content.strip():
                        found.append((number, begin, line))
                    begin += len(content)
        files, begins, lines = np.asarray(found, dtype=np.int64).reshape(-1, 3).T
        return files, begins, lines

    def __len__(self) -> int:
        return len(self._places[0])

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> str:
        """Raises DataError with file and line if it is no JSON object, or has no such text."""
        number, begin, line = (int(values[index]) for values in self._places)
        path = self.sources[number].path
        with open_regular(path) as file:
            file.seek(begin)
            return _text_of(file.readline(), self.field, path, line)


def _text_of(content: bytes, field: str, path: Path, line: int) -> str:
    try:
        document = parse_json(content.decode("utf-8"))
    except ValueError as error:
        raise DataError(f"{path}:{line}: this line is not JSON: {error}") from error
    text = document.get(field) if isinstance(document, dict) else None
    if not isinstance(text, str):
        fields = ", ".join(document) if isinstance(document, dict) else "none"
        raise DataError(f"{path}:{line}: there is no text in the field {field!r} (it has {fields}): set data.field")
    return text


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedDocuments:
    """One document a sample: cut to ``length`` tokens, or filled up to it. What is filled up counts in no loss.

    A sample has ``input_ids``, ``attention_mask`` and ``labels``, int64 [length].
    """

    documents: TextFiles | JsonLines
    tokenizer: Any
    length: int

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.tokenizer(self.documents[index], verbose=False)["input_ids"][: self.length]
        missing = self.length - len(ids)
        padding = self.tokenizer.pad_token_id
        fill = padding if padding is not None else self.tokenizer.eos_token_id or 0
        return {
            "input_ids": torch.tensor([*ids, *[fill] * missing]),
            "attention_mask": torch.tensor([*[1] * len(ids), *[0] * missing]),
            "labels": torch.tensor([*ids, *[-100] * missing]),
        }
