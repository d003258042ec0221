"""Tensors by name in safetensors files, of which each rank writes those that it was given.

A file holds at most about a GiB, so that a rank never copies more than that to the host at once. Nothing in a safetensors file is code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from heterodyne.errors import CheckpointError

__all__ = ["assigned", "read_tensors", "write_tensors"]

_FILE_BYTES = 1 << 30
_SUFFIX = ".safetensors"


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
        path = directory / f"rank-{rank}-{number}{_SUFFIX}"
        # A copy each: the format refuses tensors that share memory, as tied weights do.
        content = {name: tensors[name].detach().cpu().clone().contiguous() for name in names}
        try:
            save_file(content, path)
        except SafetensorError as error:
            raise OSError(None, str(error), str(path)) from error
        with path.open("rb") as file:
            os.fsync(file.fileno())
        written.append(path.name)
    return written


def read_tensors(
    directory: Path, files: Sequence[str], wanted: Callable[[str], bool]
) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors that are wanted, on the CPU, and the names of the others. Raises CheckpointError for a file that holds no tensors."""
    found: dict[str, Tensor] = {}
    others: set[str] = set()
    for name in files:
        if not name.endswith(_SUFFIX):
            continue
        try:
            with safe_open(directory / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 -- it is no dict
                    if wanted(key):
                        found[key] = file.get_tensor(key)
                    else:
                        others.add(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{directory / name} cannot be read ({error}); move it away to resume from an earlier one"
            ) from error
    return found, others


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
