"""Files that ranks of one host have and those of another need: their bytes go from rank to rank, a bounded piece at a time."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from heterodyne.errors import CheckpointError
from heterodyne.runtime.comm.disks import Disks
from heterodyne.text_files import open_regular

__all__ = ["Parcel", "deliver"]

T = TypeVar("T")

_PIECE_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A file of ``size`` bytes that goes from one disk to another (their numbers in `Disks`)."""

    name: str
    size: int
    source: int
    target: int


def deliver(parcels: Sequence[Parcel], disks: Disks, *, source: Path, target: Path) -> None:
    """Copy files from the directory ``source`` of some disks to the directory ``target`` of others, in this order, which is the same on
    all ranks. Every rank calls this. What has arrived is to be compared with what should have come.

    Raises CheckpointError, on every rank, if a file cannot be read or written anywhere.
    """
    faults: list[str] = []
    rank, group = disks.agreement.rank, disks.agreement.group
    for parcel in parcels:
        sender, receiver = disks.firsts[parcel.source], disks.firsts[parcel.target]
        if rank == sender:
            _send(source / parcel.name, parcel.size, receiver, group, faults)
        elif rank == receiver:
            _receive(target / parcel.name, parcel.size, sender, group, faults)

    def tell() -> None:
        if faults:
            raise CheckpointError(
                f"files cannot be brought from host to host ({'; '.join(dict.fromkeys(faults))}); make room, or make the directory writable"
            )

    disks.agreement.gather_or_raise(tell)


def _send(path: Path, size: int, peer: int, group: dist.ProcessGroup | None, faults: list[str]) -> None:
    """Send as many bytes as were promised, also of a file that cannot be read: the other side waits for them."""
    with ExitStack() as stack:
        file = _tried(faults, path, lambda: stack.enter_context(open_regular(path)))
        for piece in _pieces(size):
            if file is not None:
                _tried(faults, path, partial(_read, file, piece))
            dist.send(piece, peer, group=group)


def _receive(path: Path, size: int, peer: int, group: dist.ProcessGroup | None, faults: list[str]) -> None:
    """Write what comes; what cannot be written is received all the same."""
    with ExitStack() as stack:
        file = _tried(faults, path, lambda: stack.enter_context(path.open("wb", buffering=0)))
        for piece in _pieces(size):
            dist.recv(piece, peer, group=group)
            if file is not None:
                _tried(faults, path, partial(_write, file, piece))


def _read(file: BinaryIO, piece: Tensor) -> None:
    data = bytearray(file.read(piece.numel()))
    piece[: len(data)] = torch.frombuffer(data, dtype=torch.uint8) if data else piece[:0]


def _write(file: FileIO, piece: Tensor) -> None:
    rest = memoryview(piece.numpy().data).cast("B")
    while rest:
        rest = rest[file.write(rest) :]


def _pieces(size: int) -> Iterator[Tensor]:
    for begin in range(0, size, _PIECE_BYTES):
        yield torch.zeros(min(_PIECE_BYTES, size - begin), dtype=torch.uint8)


def _tried(faults: list[str], path: Path, do: Callable[[], T]) -> T | None:
    try:
        return do()
    except OSError as error:
        faults.append(f"{path} on {socket.gethostname()}: {error.strerror or error}")
        return None
