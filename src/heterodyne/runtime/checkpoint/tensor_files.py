"""Tensors by name in safetensors files, of which each rank writes those that it was given.

A file holds at most about a GiB. It is written tensor by tensor, so that no rank needs room for more than one, and on a CPU for none:
a worker whose memory is full can still write what it holds. Nothing in a safetensors file is code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heterodyne.errors import CheckpointError
from heterodyne.text_files import require_regular

__all__ = ["SUFFIX", "assigned", "names_in", "read_tensors", "write_tensors"]

_FILE_BYTES = 1 << 30
SUFFIX = ".safetensors"
_ALIGNMENT = 8
# https://github.com/huggingface/safetensors#format
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip


def assigned(held: Sequence[Mapping[str, int]], rank: int) -> list[str]:
    """Of the names that each rank holds, with their bytes, those that ``rank`` writes: each name once, the bytes shared out evenly.

    The largest comes first and goes to the one of its holders that has least to write so far.
    """
    holders: dict[str, list[int]] = {}
    for holder, names in enumerate(held):
        for name in names:
            holders.setdefault(name, []).append(holder)
    loads = [0] * len(held)
    mine = []
    for name in sorted(holders, key=lambda name: (-held[holders[name][0]][name], name)):
        writer = min(holders[name], key=lambda holder: (loads[holder], holder))
        loads[writer] += held[writer][name]
        if writer == rank:
            mine.append(name)
    return mine


def write_tensors(directory: Path, rank: int, tensors: Mapping[str, Tensor]) -> list[str]:
    """Write ``rank-R-K.safetensors``, to the disk itself; their names. Raises OSError."""
    written = []
    for number, names in enumerate(_files_of(tensors)):
        path = directory / f"rank-{rank}-{number}{SUFFIX}"
        _write(path, {name: tensors[name] for name in names})
        written.append(path.name)
    return written


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """The length of a header, the header, then the tensors, the widest first, so that each lies where its type wants to. Raises OSError."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, stop = {}, 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise OSError(None, f"{name} is {tensor.dtype}, which safetensors cannot hold", str(path))
        begin, stop = stop, stop + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def names_in(path: Path) -> list[str]:
    """Return the names of the tensors in a file. Raises CheckpointError for one that holds no tensors."""
    with _opened(path) as file:
        return list(file.keys())


def read_tensors(
    directory: Path, files: Sequence[str], wanted: Callable[[str], bool]
) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors that are wanted, on the CPU, and the names of the others. Raises CheckpointError for a file that holds no tensors."""
    found: dict[str, Tensor] = {}
    others: set[str] = set()
    for name in files:
        if not name.endswith(SUFFIX):
            continue
        with _opened(directory / name) as file:
            for key in file.keys():  # noqa: SIM118 -- it is no dict
                if wanted(key):
                    found[key] = file.get_tensor(key)
                else:
                    others.add(key)
    return found, others


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); move it away to resume from an earlier one") from error


def _files_of(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > _FILE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    if names:
        yield names
