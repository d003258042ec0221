"""Token files: all the text as one array of tokens, written once, then memory-mapped.

    4096 bytes     magic, then a line of JSON (version, dtype, count, hash of the source list, hash of the tokens), zero padded
    count numbers  the tokens

Without a tokenizer a token is a byte: the vocabulary is 0 to 255, and files are joined by one byte 0, which text does not
contain. A file is written under a name of its own and renamed when it is whole, so that processes which build at the same time
do not disturb each other and a reader never sees half of one.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from heterodyne.errors import DataError
from heterodyne.json_files import parse_json
from heterodyne.runtime.data.corpus import Source, fingerprint, reading
from heterodyne.text_files import open_regular, replacing, require_regular

__all__ = ["VOCABULARY", "TokenFile", "let_go_of_pages", "open_cached", "open_token_file", "open_tokens", "read_tokens"]

VOCABULARY = 256
SEPARATOR = b"\0"
MAGIC = b"HETERODYNE TOKENS\n"
VERSION = 1
HEADER_BYTES = 4096
CHUNK_BYTES = 1 << 20
_DTYPES = ("uint8", "uint16", "uint32")


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """An open token file.

    Args:
        path: where it is.
        tokens: memory-mapped, read only.  # unsigned [count]
        digest: a hash of the tokens, the same wherever the text was read from.
        vocabulary: the number of ids that a model needs; None: one more than the largest token, which has to be looked for.
        unit: what a token is, for people.
    """

    path: Path
    tokens: NDArray[Any]
    digest: str
    vocabulary: int | None = VOCABULARY
    unit: str = "bytes"


def let_go_of_pages(tokens: NDArray[Any]) -> None:
    """Let go of what was read so far of a mapped file: the system keeps it in its cache, and no longer counts it as memory of this
    process.
    """
    mapped = getattr(tokens, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def open_tokens(sources: Sequence[Source], cache: Path, *, say: Callable[[str], None]) -> TokenFile:
    """The tokens of these files, from the cache if it has them whole, else read again; ``say`` hears why.

    Raises DataError if a source cannot be read or the cache cannot be written.
    """
    wanted = fingerprint(sources)
    what = f"{len(sources)} files of text"
    return open_cached(cache, wanted, what, lambda file: _write(file, sources), say=say)


def open_cached(
    cache: Path,
    wanted: str,
    what: str,
    write: Callable[[BinaryIO], None],
    *,
    say: Callable[[str], None],
    dtype: str = "uint8",
) -> TokenFile:
    """The token file of this fingerprint, from the cache if it is there whole, else made by ``write``, which appends the tokens.

    Raises DataError if the cache cannot be written.
    """
    path = cache / f"tokens-{wanted[:16]}.bin"
    if path.exists():
        try:
            return read_tokens(path, wanted)
        except DataError as error:
            say(f"{error}; reading the text again")
    else:
        say(f"reading {what} into {path}")
    _build(path, write, wanted, dtype)
    return read_tokens(path, wanted)


def read_tokens(path: Path, source_hash: str | None = None) -> TokenFile:
    """Open a token file and check all of it against its header. Raises DataError for any disagreement."""
    try:
        with open_regular(path) as file:
            header = _read_header(file, path)
            tokens_hash = _hash(file)
    except OSError as error:
        raise DataError(f"the token file {path} cannot be read ({error.strerror})") from error
    dtype = np.dtype(header["dtype"])
    has, needs = path.stat().st_size, HEADER_BYTES + header["count"] * dtype.itemsize
    if has != needs:
        raise DataError(f"the token file {path} has {has} bytes, its header says {needs}")
    if tokens_hash != header["tokens"]:
        raise DataError(f"the token file {path} is corrupt: its content is not what was written")
    if source_hash is not None and source_hash != header["sources"]:
        raise DataError(f"the token file {path} was made of other text")
    mapped = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(header["count"],))
    return TokenFile(path=path, tokens=mapped, digest=tokens_hash)


def _read_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    raw = file.read(HEADER_BYTES)
    not_ours = DataError(
        f"{path} is not a token file of version {VERSION}, or is cut short ({len(raw)} bytes of header)"
    )
    if len(raw) != HEADER_BYTES or not raw.startswith(MAGIC):
        raise not_ours
    try:
        header = parse_json(raw[len(MAGIC) :].rstrip(b"\0").decode("utf-8"))
        good = header["version"] == VERSION and header["dtype"] in _DTYPES and header["count"] > 0
        known = isinstance(header["sources"], str) and isinstance(header["tokens"], str)
    except (ValueError, KeyError, TypeError) as error:
        raise not_ours from error
    if not (good and known):
        raise not_ours
    return dict(header)


def _build(path: Path, write: Callable[[BinaryIO], None], source_hash: str, dtype: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as place, place.open("w+b") as file:
            file.write(bytes(HEADER_BYTES))
            write(file)
            _finish(file, source_hash, dtype)
    except OSError as error:
        raise DataError(
            f"the token file {path} cannot be written ({error.strerror}); "
            "free some space or set data.cache to a directory that can be written"
        ) from error


def _write(file: BinaryIO, sources: Sequence[Source]) -> None:
    for number, source in enumerate(sources):
        if number:
            file.write(SEPARATOR)
        _copy(source.path, file)


def _finish(file: BinaryIO, source_hash: str, dtype: str) -> None:
    """The header goes in last: a file without it is not taken."""
    count = (file.tell() - HEADER_BYTES) // np.dtype(dtype).itemsize
    file.seek(HEADER_BYTES)
    tokens_hash = _hash(file)
    header = {"version": VERSION, "dtype": dtype, "count": count, "sources": source_hash, "tokens": tokens_hash}
    file.seek(0)
    file.write(MAGIC + json.dumps(header).encode())
    file.flush()
    os.fsync(file.fileno())


def _copy(source: Path, into: BinaryIO) -> None:
    with reading(source):
        file = open_regular(source)
    with file:
        while chunk := file.read(CHUNK_BYTES):
            into.write(chunk)


def _hash(file: BinaryIO) -> str:
    """Return a hash of everything from here to the end."""
    digest = hashlib.blake2b(digest_size=32)
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


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
    """Return a hash of its length and of three parts of it, for it may be too long to be read whole."""
    digest = hashlib.blake2b(f"{tokens.dtype} {len(tokens)}".encode(), digest_size=32)
    for first in (0, max(0, len(tokens) // 2), max(0, len(tokens) - _PROBE)):
        digest.update(np.ascontiguousarray(tokens[first : first + _PROBE]).tobytes())
    return digest.hexdigest()
