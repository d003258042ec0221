"""What a checkpoint says of itself, and whether it is whole.

The manifest is the last file that is written into a checkpoint. It lists every other file with its size and SHA-256, the
step, and the identity of the run: the fields of the job that decide the losses, and what the data are; and it has a digest of
itself. The step is the position in everything: in the schedule, in the order of samples and in the history of losses.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from heterodyne.errors import CheckpointError
from heterodyne.json_files import read_json
from heterodyne.text_files import open_regular

__all__ = ["MANIFEST", "FileRecord", "Manifest", "differences", "record", "write_json"]

MANIFEST = "manifest.json"
VERSION: Final = 3
_CHUNK_BYTES = 1 << 20
_MANIFEST_BYTES = 64 << 20
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=200)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(_Strict):
    """A file as it was written."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _with_sections(identity: dict[str, Any]) -> dict[str, Any]:
    job = identity.get("job", {})
    if not isinstance(job, dict) or not all(isinstance(section, dict) for section in job.values()):
        raise ValueError("its job has no sections")
    return identity


class Manifest(_Strict):
    """Of one checkpoint.

    Args:
        step: optimizer steps that were done.
        identity: what a run must agree in to continue it, as nested JSON values.
        world_size: how many ranks there were.
        torch: the version that wrote it.
        files: every file but the manifest.
        hosts: of a file of which not every host has a copy, the hosts on whose disk it was written. Empty where all share a disk.
    """

    version: Literal[3] = VERSION
    step: Annotated[int, Field(ge=0)]
    identity: Annotated[dict[str, Any], AfterValidator(_with_sections)]
    world_size: Annotated[int, Field(ge=1)]
    torch: str
    files: Annotated[dict[FileName, FileRecord], Field(min_length=1)]
    hosts: dict[FileName, list[str]] = {}

    def save(self, directory: Path) -> None:
        """Write it, to the disk itself. Raises OSError."""
        fields = self.model_dump(mode="json")
        if not self.hosts:
            del fields["hosts"]
        write_json(directory / MANIFEST, {**fields, "digest": _digest(fields)})

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Raises CheckpointError if it is not there, not a manifest of this version, or not as it was written."""
        path = directory / MANIFEST
        try:
            content = read_json(path, _MANIFEST_BYTES)
            if content.get("version") != VERSION:
                raise CheckpointError(f"{path} is of another version than {VERSION}: use the release that wrote it")
            digest = content.pop("digest")
            if digest != _digest(content):
                raise CheckpointError(f"{path} has another content than was written")
            return cls.model_validate(content)
        except FileNotFoundError as error:
            raise CheckpointError(f"{MANIFEST} is missing") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
        except ValidationError as error:
            places = ", ".join(".".join(map(str, fault["loc"])) for fault in error.errors()[:3])
            raise CheckpointError(f"{path} is corrupt: {places} cannot be as it is") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is corrupt: it is no manifest") from error

    def compare(self, directory: Path) -> tuple[frozenset[str], dict[str, str]]:
        """Read every file that is there and compare it with its record: return those that are as they were written, and of the others what
        is wrong.
        """
        good: set[str] = set()
        faults: dict[str, str] = {}
        for name, wanted in self.files.items():
            try:
                size = (directory / name).stat().st_size
                found = (
                    record(directory / name) if size == wanted.bytes else FileRecord(bytes=size, sha256=wanted.sha256)
                )
            except FileNotFoundError:
                continue
            except OSError as error:
                faults[name] = f"{name} cannot be read ({error.strerror})"
            else:
                if found.bytes != wanted.bytes:
                    faults[name] = f"{name} has {found.bytes} bytes of {wanted.bytes}"
                elif found != wanted:
                    faults[name] = f"{name} has another content than was written"
                else:
                    good.add(name)
        return frozenset(good), faults

    def out_of_place(self, directory: Path) -> list[str]:
        """Return why nothing in a directory is to be used: files that it does not list, or a name of another step."""
        known = {*self.files, MANIFEST}
        faults = [
            f"{path.name} was not written with it" for path in sorted(directory.iterdir()) if path.name not in known
        ]
        named = re.fullmatch(r"step-([0-9]+)", directory.name)
        if named and int(named[1]) != self.step:
            faults.append(f"it is of step {self.step}")
        return faults


def record(path: Path) -> FileRecord:
    """Size and SHA-256 of a file. Raises OSError."""
    size, digest = 0, hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            digest.update(chunk)
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def write_json(path: Path, content: Any) -> None:
    """Write it, to the disk itself. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
