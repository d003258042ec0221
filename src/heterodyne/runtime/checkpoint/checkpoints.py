"""Checkpoints of a run: ``step-N`` directories that are whole or not there.

A checkpoint is written by all ranks into ``step-N.partial-xxxx``; what several ranks hold under one name is written by one of
them. When every file is on the disk, the manifest is written, and then the directory gets its name: a process that is killed at
any moment leaves the previous checkpoint as it was. Where ranks see different disks behind the directory, each disk has what its ranks
wrote, and the same state, plan and manifest; together they are the checkpoint (`heterodyne.runtime.checkpoint.found`), and what a disk
lacks when it is read comes from one that has it (`heterodyne.runtime.checkpoint.fetch`). Nothing in it is code, and nothing is taken for
what it is not: every byte is checked before any is used.

    step-N/
      rank-R-K.safetensors   tensors by name: of the state, and of the random number generators of rank R
      state.json             what holds the tensors, see `heterodyne.runtime.checkpoint.state_json`
      plan.json              the plan at that time
      manifest.json          see `heterodyne.runtime.checkpoint.manifest`
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heterodyne.errors import CheckpointError
from heterodyne.json_files import read_json
from heterodyne.runtime.checkpoint.fetch import fetch
from heterodyne.runtime.checkpoint.found import PLAN, Checkpoint, seen_in, together
from heterodyne.runtime.checkpoint.manifest import FileRecord, Manifest, record, write_json
from heterodyne.runtime.checkpoint.random_state import random_state
from heterodyne.runtime.checkpoint.state_json import decoded, encoded
from heterodyne.runtime.checkpoint.state_tree import graft, keys_of, merged, require_whole, strip
from heterodyne.runtime.checkpoint.tensor_files import assigned, read_tensors, write_tensors
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.comm.disks import Disks

__all__ = ["Checkpoints", "Restored", "own_part", "taken_from"]

_SKELETON = "state.json"
_SKELETON_BYTES = 1 << 30
_WHOLE = re.compile(r"^step-([0-9]+)$")
_PARTIAL = re.compile(r"^step-[0-9]+\.partial-[0-9a-f]+$")
_ROOT, _STATE, _RANDOM = "checkpoint", "state", "random"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What came out of a checkpoint.

    Args:
        step: optimizer steps that were done.
        state: as it was given to `Checkpoints.save`, by all ranks together; only what was wanted of it. Its tensors are on the CPU, and
            those of which ranks wrote pieces are in `Pieces`; either is read from its file where it is looked at.
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
        say: is informed, on rank 0, of what was passed over.
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
        self.keep = keep
        self._ranks = agreement or Agreement.alone()
        self._say = say
        self._good: set[int] = set()  # steps of those that were written or read here
        self._behind: Disks | None = None

    @property
    def disks(self) -> Disks:
        """The disks behind the directory, which is made where it is not there; to be asked for by all ranks together."""
        if self._behind is None:
            self._behind = Disks.behind(self.directory, self._ranks)
        return self._behind

    def save(
        self,
        step: int,
        state: Any,
        *,
        identity: Mapping[str, Any],
        plan: str,
    ) -> Path:
        """Write a checkpoint. The oldest ones stay until `prune`.

        Args:
            step: optimizer steps that were done.
            state: nested dicts and lists with tensors or `Pieces`, or the part of them that this rank has; what several ranks hold under
                one name must be equal. A rank without any state gives None.
            identity: what a run must agree in to continue this one, as nested JSON values.
            plan: its text.

        Raises CheckpointError on every rank if any of them cannot write; the earlier checkpoints are then as they were.
        """
        tensors, skeleton = own_part(state, {str(self._ranks.rank): random_state()})

        def write_parts(partial: Path) -> tuple[list[dict[str, FileRecord]], Callable[[], Any]]:
            parts = self._ranks.gather_or_raise(
                lambda: (encoded(skeleton), {name: tensor.nbytes for name, tensor in tensors.items()})
            )
            mine = assigned([held for _, held in parts], self._ranks.rank)
            written = self._ranks.gather_or_raise(
                lambda: self._write(partial, step, {name: tensors[name] for name in mine})
            )
            return written, lambda: merged([decoded(part) for part, _ in parts])

        return self._made(step, write_parts, identity=identity, plan=plan, world_size=self._ranks.size)

    def adopt(
        self,
        folder: Path,
        written: Sequence[Mapping[str, FileRecord]],
        *,
        step: int,
        skeleton: Any,
        identity: Mapping[str, Any],
        plan: str,
        world_size: int,
    ) -> Path:
        """Make a checkpoint of files in a folder that ranks have written, each its own part (`own_part`).

        ``written``: of each rank of now, the files that it finds in the folder and nobody of a lower rank does.

        Raises CheckpointError if parts are missing, or it cannot be written.
        """

        def move_parts(partial: Path) -> tuple[Sequence[Mapping[str, FileRecord]], Callable[[], Any]]:
            def move() -> None:
                for name in written[self._ranks.rank]:
                    try:
                        (folder / name).rename(partial / name)
                    except OSError as error:
                        raise self._unwritten(step, str(error.strerror)) from error

            self._ranks.gather_or_raise(move)
            return written, lambda: skeleton

        return self._made(step, move_parts, identity=identity, plan=plan, world_size=world_size)

    def _made(
        self,
        step: int,
        write_parts: Callable[[Path], tuple[Sequence[Mapping[str, FileRecord]], Callable[[], Any]]],
        *,
        identity: Mapping[str, Any],
        plan: str,
        world_size: int,
    ) -> Path:
        """Make a checkpoint of what ranks write into a directory, each of its own disk; ``write_parts`` returns the files of each, and what
        makes the whole skeleton.
        """
        disks = self.disks
        partial = self.directory / self._ranks.on_rank0(lambda: f"step-{step}.partial-{secrets.token_hex(4)}")
        final = self.directory / f"step-{step}"
        try:
            disks.on_each(lambda: self._begin(partial, step))
            written, skeleton = write_parts(partial)
            manifest = Manifest(
                step=step,
                identity=dict(identity),
                world_size=world_size,
                torch=torch.__version__,
                files={name: file for files in written for name, file in files.items()},
                hosts={
                    name: list(disks.hosts[disks.of_rank(rank)]) for rank, files in enumerate(written) for name in files
                }
                if len(disks.ranks) > 1
                else {},
            )
            disks.on_each(lambda: self._complete(partial, manifest, skeleton(), plan))
            disks.on_each(lambda: self._name(partial, final, step))
        except CheckpointError:
            if self._ranks.rank in disks.firsts:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self._good.add(step)
        return final

    def prune(self) -> None:
        """Let go of the oldest ones, now that the newest has shown that it is good."""
        self.disks.on_each(self._prune)

    def set_aside(self, step: int) -> None:
        """Give the one of a step a name under which it is not found: what it holds has shown that it is not good."""
        self.disks.on_each(lambda: self._set_aside(step))

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, every byte of it checked; those that are not are told. None without any.

        Raises CheckpointError if there are some and none is whole: to begin anew in silence would overwrite what is left of the run.
        """
        if not any(self._ranks.gather_or_raise(self.directory.exists)):
            return None
        steps = {step for of_disk in self.disks.on_each(lambda: [*map(_step_of, self._whole())]) for step in of_disk}
        passed_over: list[str] = []
        for step in sorted(steps, reverse=True):
            path = self.directory / f"step-{step}"
            try:
                found = self.at(path)
            except CheckpointError as error:
                passed_over.append(f"{path.name}: {error}")
                continue
            for told in passed_over if self._ranks.rank == 0 else ():
                self._say(f"passing over {told}")
            return found
        if passed_over:
            none = CheckpointError(
                f"no checkpoint in {self.directory} is whole:\n  - "
                + "\n  - ".join(passed_over)
                + "\nmove that directory away to begin this run anew, or start in another run directory"
            )
            none.shared = True
            raise none
        return None

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
        path, mine = checkpoint.path, str(self._ranks.rank)

        def is_wanted(name: str) -> bool:
            kind, *keys = keys_of(name)
            return wanted(keys) if kind == _STATE else keys[0] == mine

        absent = fetch(checkpoint, self.disks, is_wanted)
        self._good.add(checkpoint.step)
        try:
            skeleton = decoded(read_json(path / _SKELETON, _SKELETON_BYTES))
            tensors, others = read_tensors(path, sorted(checkpoint.manifest.files.keys() - absent.keys()), is_wanted)
            others.update(name for names in absent.values() for name in names)
            # Each for itself: of a state of which nothing is wanted, what is no tensor is wanted all the same.
            state = graft(skeleton.get(_STATE), tensors, without=others)
            generators = graft(skeleton[_RANDOM].get(mine), tensors)
        except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); resume from an earlier one by moving it away"
            ) from error
        return Restored(step=checkpoint.step, state=state, random=generators)

    def at(self, path: Path) -> Checkpoint:
        """The checkpoint in that directory, every byte of it checked. Raises CheckpointError that names what is wrong."""
        disks = self.disks
        of_disks = disks.on_each(lambda: seen_in(path))
        return self._ranks.on_rank0(lambda: together(path, of_disks, disks.hosts))

    def _whole(self) -> list[Path]:
        """Those that have their final name, the newest first."""
        found = [path for path in _entries(self.directory) if _WHOLE.match(path.name)]
        return sorted(found, key=_step_of, reverse=True)

    def _begin(self, partial: Path, step: int) -> None:
        """Clean up after a process that was killed while it wrote, and make room for the next checkpoint."""
        for path in _entries(self.directory):
            if _PARTIAL.match(path.name):
                shutil.rmtree(path, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise self._unwritten(step, str(error.strerror)) from error

    def _write(self, partial: Path, step: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, FileRecord]:
        """What this rank has to write, and the records of its files."""
        try:
            return {name: record(partial / name) for name in write_tensors(partial, self._ranks.rank, tensors)}
        except OSError as error:
            raise self._unwritten(step, f"rank {self._ranks.rank}: {error.strerror}") from error

    def _prune(self) -> None:
        newer = 0
        for path in self._whole():
            # One that nobody here has looked at may be damaged, and is no reason to let go of another.
            if newer >= self.keep:
                shutil.rmtree(path, ignore_errors=True)
            newer += _step_of(path) in self._good

    def _set_aside(self, step: int) -> None:
        path = self.directory / f"step-{step}"
        aside = path.with_name(f"{path.name}.not-finite")
        try:
            if aside.exists():
                shutil.rmtree(aside)
            if path.exists():
                path.rename(aside)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be renamed ({error.strerror}); remove it before you resume"
            ) from error

    def _complete(self, partial: Path, manifest: Manifest, skeleton: Any, plan: str) -> None:
        """Write what every disk has: plan, skeleton and, last, the manifest."""
        require_whole(skeleton)
        try:
            with (partial / PLAN).open("w", encoding="utf-8") as file:
                file.write(plan)
                file.flush()
                os.fsync(file.fileno())
            write_json(partial / _SKELETON, encoded(skeleton))
            own = {name: record(partial / name) for name in (PLAN, _SKELETON)}
            manifest.model_copy(update={"files": {**manifest.files, **own}}).save(partial)
            _sync(partial)
        except OSError as error:
            raise self._unwritten(manifest.step, str(error.strerror)) from error

    def _name(self, partial: Path, final: Path, step: int) -> None:
        try:
            if os.path.lexists(final):  # a damaged one that was passed over, or this very step again
                final.rename(final.with_name(f"{final.name}.partial-{secrets.token_hex(4)}"))
            partial.rename(final)
            _sync(self.directory)
        except OSError as error:
            raise self._unwritten(step, str(error.strerror)) from error

    def _unwritten(self, step: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {step} cannot be written to {self.directory} ({reason}); {_REMEDY}"
        )


def own_part(state: Any, generators: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
    """Return what one rank writes of a checkpoint: its tensors by name, and what holds them. ``state`` None: it has none."""
    return strip({**({} if state is None else {_STATE: state}), _RANDOM: generators}, _ROOT)


@contextmanager
def taken_from(what: str, remedy: str) -> Iterator[None]:
    """While a state of somebody's is put into a model: whatever does not fit there is a CheckpointError that begins with ``what``.

    The bytes of a checkpoint are as they were written; so it was written by a program that is not this one.
    """
    try:
        yield
    except (CheckpointError, KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error}".split())
        raise CheckpointError(f"{what} that this run cannot take ({reason[:300]}); {remedy}") from error


_REMEDY = "the checkpoints before it are as they were: make room or make the directory writable"


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read ({error.strerror}); make it readable") from error


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
