"""The state of a run out of the memory of its ranks, when one of them cannot go on: each writes what it holds, alone.

No rank waits for another here, for the others may hang in an exchange. So nobody knows whether the parts make a whole; that is seen by who
puts them together, when the run goes on. They do if all ranks were behind the same step, and none in the middle of its update.

    rescue/
      rank-R-K.safetensors   tensors by name
      rank-R.json            what holds them, of which step; written last, so a part that has it is whole
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from heterodyne.errors import CheckpointError
from heterodyne.json_files import EXACT, Count, checked, read_json
from heterodyne.runtime.checkpoint.checkpoints import Checkpoints, own_part
from heterodyne.runtime.checkpoint.manifest import FileRecord, record
from heterodyne.runtime.checkpoint.state_json import decoded, encoded
from heterodyne.runtime.checkpoint.state_tree import merged
from heterodyne.runtime.checkpoint.tensor_files import write_tensors
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.text_files import write_text

__all__ = ["Moment", "Rescue", "rescued"]

_FOLDER = "rescue"


@dataclass(frozen=True, kw_only=True, eq=False)
class Moment:
    """What a rank holds after ``step`` steps (see `Worker.held`), and the state of its random number generators at that time."""

    step: int
    state: Mapping[str, Any]
    random: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _About:
    """What a rank says of its part."""

    __pydantic_config__ = EXACT

    rank: Annotated[int, Field(ge=0)]
    size: Annotated[int, Field(ge=1)]
    run: str
    identity: dict[str, Any]
    plan: str
    step: Count
    skeleton: Any
    files: dict[str, FileRecord]


class Rescue:
    """Writes the part of one rank, once, whichever thread asks for it first; the others wait until it is there.

    Args:
        directory: of the run's checkpoints.
        rank, size: who, of how many.
        run: the same on all ranks, and another one whenever they start.
        identity, plan: as of a checkpoint.
        moment: gives what is held; None in the middle of an update. Asked from any thread.
        still: whether that is what is held now, too.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        size: int,
        run: str,
        identity: Mapping[str, Any],
        plan: str,
        moment: Callable[[], Moment | None],
        still: Callable[[Moment], bool],
    ) -> None:
        self._folder = directory / _FOLDER
        self._rank = rank
        self._about = {"rank": rank, "size": size, "run": run, "identity": dict(identity), "plan": plan}
        self._moment = moment
        self._still = still
        self._lock = threading.Lock()
        self._written = False

    def write(self) -> None:
        """Nothing that goes wrong here is raised: this process ends anyway, and of a worse cause."""
        with self._lock:
            if self._written:
                return
            self._written = True
            with suppress(Exception):
                self._write()

    def _write(self) -> None:
        moment = self._moment()
        if moment is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        tensors, skeleton = own_part(dict(moment.state), {str(self._rank): dict(moment.random)})
        files = {
            name: record(self._folder / name).model_dump() for name in write_tensors(self._folder, self._rank, tensors)
        }
        content = {**self._about, "step": moment.step, "skeleton": encoded(skeleton), "files": files}
        if self._still(moment):
            write_text(self._folder / f"rank-{self._rank}.json", json.dumps(content))


def rescued(directory: Path, ranks: Agreement) -> tuple[int | None, str]:
    """Make a checkpoint of what ranks have rescued, on whichever disks: of which step, and "". None if that cannot be, with the reason; ""
    if nothing was rescued. The parts are gone then. Every rank calls this.
    """
    folder = directory / _FOLDER
    if not any(ranks.gather_or_raise(folder.is_dir)):
        return None, ""
    checkpoints = Checkpoints(directory, agreement=ranks)
    try:
        return _assembled(checkpoints, folder, ranks), ""
    except CheckpointError as error:
        return None, " ".join(str(error).split())
    finally:
        checkpoints.disks.on_each(lambda: shutil.rmtree(folder, ignore_errors=True))


def _assembled(checkpoints: Checkpoints, folder: Path, ranks: Agreement) -> int:
    acts = ranks.rank in checkpoints.disks.firsts
    of_ranks = ranks.gather_or_raise(lambda: _parts(folder) if acts else [])
    parts = [part for found in of_ranks for part in found]
    if not parts:
        raise CheckpointError("the ranks were in the middle of an update")
    last = max(parts, key=lambda part: part[1])[0]
    abouts = {about.rank: about for about, _ in parts if about.run == last.run}
    missing = [str(rank) for rank in range(last.size) if rank not in abouts]
    if missing:
        raise CheckpointError(
            f"of rank {', '.join(missing)} there is nothing: it was in the middle of an update, or was killed"
        )
    steps = {about.step for about in abouts.values()}
    if len(steps) > 1:
        raise CheckpointError(f"some ranks were behind step {min(steps)}, others behind step {max(steps)}")
    checkpoints.adopt(
        folder,
        [
            {name: file for about, _ in found if about.run == last.run for name, file in about.files.items()}
            for found in of_ranks
        ],
        step=last.step,
        skeleton=merged([decoded(about.skeleton) for _, about in sorted(abouts.items())]),
        identity=last.identity,
        plan=last.plan,
        world_size=last.size,
    )
    return last.step


def _parts(folder: Path) -> list[tuple[_About, float]]:
    """Return what ranks say of their parts that are in a folder, and when each was written. Raises CheckpointError for what they have not
    written so.
    """
    try:
        found = [
            (checked(_About, read_json(path)), path.stat().st_mtime) for path in sorted(folder.glob("rank-*.json"))
        ]
        for about, _ in found:
            decoded(about.skeleton)
            for name, written in about.files.items():
                if record(folder / name) != written:
                    raise CheckpointError(f"{name} has another content than was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(str(error)) from error
    return found
