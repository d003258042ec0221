"""Checkpoints of a run: ``step-N`` directories that are whole or not there.

A checkpoint is written by all ranks, through torch.distributed.checkpoint, into ``step-N.partial-xxxx``; what several
ranks hold alike is written by one of them. When every file is on the disk, the manifest is written, and then the directory
gets its name: a process that is killed at any moment leaves the previous checkpoint as it was. The directory must be one
that all ranks see.

    step-N/
      __R_0.distcp, .metadata   torch.distributed.checkpoint's own: tensors by name, the skeleton that holds them, one entry
                                ``random/R`` a rank
      plan.json                 the plan at that time
      manifest.json             see `heterodyne.runtime.checkpoint.manifest`
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_entries
from torch.distributed.checkpoint.state_dict_saver import save as write_entries

from heterodyne.errors import CheckpointError
from heterodyne.job import decisive
from heterodyne.runtime.checkpoint.manifest import Manifest, differences, record
from heterodyne.runtime.checkpoint.random_state import random_state
from heterodyne.runtime.checkpoint.state_tree import graft, keys_of, merged, strip
from heterodyne.runtime.meeting.agreement import Agreement

__all__ = ["Checkpoint", "Checkpoints", "Restored"]

PLAN = "plan.json"
_WHOLE = re.compile(r"^step-([0-9]+)$")
_PARTIAL = re.compile(r"^step-[0-9]+\.partial-[0-9a-f]+$")
_STATE, _SKELETON, _RANDOM = "state", "skeleton", "random"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was found whole."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def plan(self) -> str:
        """The text of the plan that it was written under."""
        return (self.path / PLAN).read_text(encoding="utf-8")

    def require(self, identity: Mapping[str, Any]) -> None:
        """Raises CheckpointError, with the fields that differ, if it is of a run of another identity."""
        there = dict(self.manifest.identity)
        if "job" in there:
            there["job"] = decisive(there["job"])  # an older release recorded more fields
        other = differences(there, identity)
        if other:
            raise CheckpointError(
                f"{self.path} belongs to another job:\n  - "
                + "\n  - ".join(other)
                + "\nresume with the job that wrote it, or start anew in another run directory"
            )


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What came out of a checkpoint.

    Args:
        step: optimizer steps that were done.
        state: as it was given to `Checkpoints.save`, by all ranks together, tensors on the CPU; only what was wanted of it.
        random: this rank's `random_state`, None if the checkpoint was written by fewer ranks.
    """

    step: int
    state: Any
    random: dict[str, Any] | None


class Checkpoints:
    """The checkpoints in one directory, as all ranks together see them. Every method is called by all ranks.

    Args:
        directory: where they are; made when first needed.
        keep: so many of the newest stay.
        agreement: the ranks.
        say: is told, on rank 0, of what was passed over.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        agreement: Agreement | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.directory = directory
        self._keep = keep
        self._ranks = agreement or Agreement(group=None, rank=0, size=1)
        self._say = say

    def save(self, step: int, state: Any, *, identity: Mapping[str, Any], plan: str) -> Path:
        """Write a checkpoint and let go of the oldest ones.

        Args:
            step: optimizer steps that were done.
            state: nested dicts and lists with tensors, or the part of them that this rank has; what several ranks hold under one
                name must be equal. A rank without any state gives None.
            identity: what a run must agree in to continue this one, as nested JSON values.
            plan: its text.

        Raises CheckpointError on every rank if any of them cannot write; the earlier checkpoints are then as they were.
        """
        partial = self._ranks.first(lambda: self._begin(step))
        try:
            tensors, skeleton = strip(state, _STATE)
            whole = merged(self._ranks.each(lambda: skeleton))
            entries: dict[str, Any] = {**tensors, f"{_RANDOM}/{self._ranks.rank}": random_state(), _SKELETON: whole}
            with self._explained(f"the checkpoint of step {step} cannot be written to {self.directory}", _REMEDY):
                write_entries(
                    entries,
                    storage_writer=FileSystemWriter(partial),
                    planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                    process_group=self._ranks.group,
                    no_dist=self._ranks.size == 1,
                )
            files = self._ranks.each(lambda: self._records(partial))
            manifest = Manifest(
                step=step,
                identity=identity,
                world_size=self._ranks.size,
                torch=torch.__version__,
                files={name: file for written in files for name, file in written.items()},
            )
            return self._ranks.first(lambda: self._finish(partial, manifest, plan))
        except CheckpointError:
            if self._ranks.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, every byte of it checked; those that are not are told. None without any.

        Raises CheckpointError if there are some and none is whole: to begin anew in silence would overwrite what is left of the run.
        """
        return self._ranks.first(self._latest)

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        identity: Mapping[str, Any],
        wanted: Callable[[Sequence[str]], bool] = lambda _: True,
    ) -> Restored:
        """Read a checkpoint that `latest` or `at` found, or of its tensors those that are ``wanted`` here: it is asked for the keys that
        lead to each. Raises CheckpointError if it is of a run of another identity.
        """
        checkpoint.require(identity)
        entries: dict[str, Any] = {}
        left_out: set[str] = set()
        with self._explained(f"{checkpoint.path} cannot be read", "resume from an earlier one by moving it away"):
            reader = FileSystemReader(checkpoint.path)
            mine = f"{_RANDOM}/{self._ranks.rank}"
            for name, entry in reader.read_metadata().state_dict_metadata.items():
                if isinstance(entry, TensorStorageMetadata):
                    if not wanted(keys_of(name)):
                        left_out.add(name)
                    else:
                        entries[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
                elif name in (_SKELETON, mine):
                    entries[name] = None
            read_entries(
                entries,
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._ranks.group,
                no_dist=self._ranks.size == 1,
            )
        tensors: dict[str, Tensor] = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
        state = graft(entries.get(_SKELETON), tensors, without=left_out)
        return Restored(step=checkpoint.step, state=state, random=entries.get(mine))

    def at(self, path: Path) -> Checkpoint:
        """The checkpoint in that directory, every byte of it checked. Raises CheckpointError that names what is wrong."""
        return self._ranks.first(lambda: _inspect(path))

    def _latest(self) -> Checkpoint | None:
        damaged: list[str] = []
        for path in self._whole():
            try:
                found = _inspect(path)
            except CheckpointError as error:
                damaged.append(f"{path.name}: {error}")
                continue
            for told in damaged:
                self._say(f"passing over {told}")
            return found
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self.directory} is whole:\n  - "
                + "\n  - ".join(damaged)
                + "\nmove that directory away to begin this run anew, or start in another run directory"
            )
        return None

    def _whole(self) -> list[Path]:
        """Those that have their final name, the newest first."""
        found = [path for path in _entries(self.directory) if _WHOLE.match(path.name)]
        return sorted(found, key=_step_of, reverse=True)

    def _begin(self, step: int) -> Path:
        """Clean up after a process that was killed while it wrote, and make room for the next checkpoint."""
        for path in _entries(self.directory):
            if _PARTIAL.match(path.name):
                shutil.rmtree(path, ignore_errors=True)
        partial = self.directory / f"step-{step}.partial-{secrets.token_hex(4)}"
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.directory} ({error.strerror}); {_REMEDY}"
            ) from error
        return partial

    def _records(self, partial: Path) -> dict[str, Any]:
        """What this rank has written; rank 0 also what belongs to all."""
        names = [path.name for path in partial.glob(f"__{self._ranks.rank}_*.distcp")]
        try:
            return {name: record(partial / name) for name in names}
        except OSError as error:
            raise CheckpointError(f"{error.filename} cannot be read back ({error.strerror})") from error

    def _finish(self, partial: Path, manifest: Manifest, plan: str) -> Path:
        final = self.directory / f"step-{manifest.step}"
        try:
            with (partial / PLAN).open("w", encoding="utf-8") as file:
                file.write(plan)
                file.flush()
                os.fsync(file.fileno())
            own = {name: record(partial / name) for name in (PLAN, ".metadata")}
            Manifest(**{**vars(manifest), "files": {**manifest.files, **own}}).save(partial)
            _sync(partial)
            if final.exists():  # a damaged one that was passed over, or this very step again
                final.rename(final.with_name(f"{final.name}.partial-{secrets.token_hex(4)}"))
            partial.rename(final)
            _sync(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {manifest.step} cannot be written to {self.directory} ({error.strerror}); {_REMEDY}"
            ) from error
        for old in self._whole()[self._keep :]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    @contextlib.contextmanager
    def _explained(self, what: str, remedy: str) -> Iterator[None]:
        """Errors of torch.distributed.checkpoint, which it raises on every rank, in our words."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process alone is meant
                yield
        except CheckpointException as error:
            reasons = [
                f"rank {rank}: {getattr(cause, 'strerror', None) or cause}"
                for rank, (cause, _) in error.failures.items()
            ]
            raise CheckpointError(f"{what} ({'; '.join(reasons)}); {remedy}") from error


_REMEDY = "the checkpoints before it are as they were: make room or make the directory writable, then resume"


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read ({error.strerror}); make it readable") from error


def _inspect(path: Path) -> Checkpoint:
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}")
    manifest = Manifest.load(path)
    manifest.check(path)
    return Checkpoint(path=path, manifest=manifest)


def _step_of(path: Path) -> int:
    match = _WHOLE.match(path.name)
    return int(match[1]) if match else -1


def _sync(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
