"""Tokenizers from a local Hugging Face directory, and text files as tokens of theirs."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from heterodyne.errors import DataError
from heterodyne.runtime.data.corpus import Source, fingerprint
from heterodyne.runtime.data.tokens import TokenFile, open_cached
from heterodyne.text_files import read_bytes, require_regular_in

__all__ = ["has_tokenizer", "load_tokenizer", "open_tokenized"]

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_AT_ONCE = 256


def has_tokenizer(directory: Path) -> bool:
    """Return whether one was saved there."""
    return any((directory / name).is_file() for name in _FILES)


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a local directory. Raises DataError."""
    if not has_tokenizer(directory):
        raise DataError(
            f"data.tokenizer: {directory} has no tokenizer (none of {', '.join(_FILES[:3])}, ...); save one there with "
            "tokenizer.save_pretrained(directory)"
        )
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise DataError(
            "data.tokenizer needs Transformers; install it with pip install 'heterodyne[huggingface]'"
        ) from error
    try:
        require_regular_in(directory)
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # its files may hold anything, and what Transformers makes of them raises anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"data.tokenizer: the tokenizer in {directory} cannot be loaded: {reason}") from error


def open_tokenized(
    sources: Sequence[Source],
    documents: Callable[[], Iterable[str]],
    directory: Path,
    cache: Path,
    *,
    form: str = "text",
    say: Callable[[str], None],
) -> TokenFile:
    """The documents of these files as tokens, each followed by the tokenizer's end of sequence if it has one.

    They are tokenized once and kept in ``cache``. ``form``: how documents are found in the files. Raises DataError.
    """
    tokenizer = load_tokenizer(directory)
    digest = hashlib.sha256(f"{form} {fingerprint(sources)}".encode())
    for name in _FILES:
        if (directory / name).is_file():
            digest.update(read_bytes(directory / name, 2**30))
    dtype = "uint16" if len(tokenizer) <= 2**16 else "uint32"

    def write(file: BinaryIO) -> None:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        for texts in _grouped(documents()):
            for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                file.write(np.asarray([*ids, *end], dtype=dtype).tobytes())

    what = f"{len(sources)} files as tokens of {directory}"
    file = open_cached(cache, digest.hexdigest(), what, write, say=say, dtype=dtype)
    return TokenFile(path=file.path, tokens=file.tokens, digest=file.digest, vocabulary=len(tokenizer), unit="tokens")


def _grouped(texts: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(texts)
    while group := list(islice(iterator, _AT_ONCE)):
        yield group
