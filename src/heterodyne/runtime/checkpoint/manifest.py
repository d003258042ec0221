"""What a checkpoint says of itself, and whether it is whole.

The manifest is the last file that is written into a checkpoint. It lists every other file with its size and checksum, the
step, and the identity of the run: the fields of the job that decide the losses, and what the data are. The step is the
position in everything: in the schedule, in the order of samples and in the history of losses.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heterodyne.errors import CheckpointError

__all__ = ["FileRecord", "Manifest", "differences", "record"]

MANIFEST = "manifest.json"
VERSION = 1
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file as it was written."""

    bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Of one checkpoint.

    Args:
        step: optimizer steps that were done.
        identity: what a run must agree in to continue it, as nested JSON values.
        world_size: how many ranks there were.
        torch: the version that wrote it.
        files: every file but the manifest.
    """

    step: int
    identity: Mapping[str, Any]
    world_size: int
    torch: str
    files: Mapping[str, FileRecord]

    def save(self, directory: Path) -> None:
        """Write it, to the disk itself."""
        with (directory / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump({"version": VERSION, **asdict(self)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Raises CheckpointError if it is not there or not a manifest of this version."""
        path = directory / MANIFEST
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("version") != VERSION:
                raise CheckpointError(f"{path} is of another version than {VERSION}: use the release that wrote it")
            files = {name: FileRecord(**file) for name, file in content.pop("files").items()}
            return cls(**content, files=files)
        except FileNotFoundError as error:
            raise CheckpointError(f"{directory} is no whole checkpoint: {MANIFEST} is missing") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is corrupt: it is no manifest") from error

    def check(self, directory: Path) -> None:
        """Read every file and compare it with its record. Raises CheckpointError that names each file that is wrong."""
        faults = []
        for name, wanted in self.files.items():
            try:
                found = record(directory / name)
            except FileNotFoundError:
                faults.append(f"{name} is missing")
            except OSError as error:
                faults.append(f"{name} cannot be read ({error.strerror})")
            else:
                if found.bytes != wanted.bytes:
                    faults.append(f"{name} has {found.bytes} bytes of {wanted.bytes}")
                elif found != wanted:
                    faults.append(f"{name} has another content than was written")
        if faults:
            raise CheckpointError(f"{directory} is no whole checkpoint: {'; '.join(faults)}")


def record(path: Path) -> FileRecord:
    """Size and CRC-32 of a file. Raises OSError."""
    size, checksum = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return FileRecord(bytes=size, crc32=checksum)


def differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The fields in which two nested values differ, as ``job.training.seed: 0 there, 1 here``."""
    found = []
    for key in sorted(there.keys() | here.keys()):
        name, a, b = f"{prefix}{key}", there.get(key), here.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{name}.")
        elif a != b:
            found.append(f"{name}: {a!r} there, {b!r} here")
    return found
