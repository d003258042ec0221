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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from heterodyne.errors import CheckpointError
from heterodyne.json_files import read_json
from heterodyne.plan.boxes import Slice
from heterodyne.runtime.checkpoint.checkpoints import Checkpoints
from heterodyne.runtime.checkpoint.manifest import FileRecord, record
from heterodyne.runtime.checkpoint.state_json import decoded, encoded
from heterodyne.runtime.checkpoint.state_tree import graft, merged, strip
from heterodyne.runtime.checkpoint.tensor_files import read_tensors, write_tensors
from heterodyne.runtime.weights.held_state import Held, Piece, joined
from heterodyne.text_files import write_text

__all__ = ["Moment", "Rescue", "rescued"]

_FOLDER = "rescue"
_STATE, _RANDOM, _PIECES = "state", "random", "pieces"


@dataclass(frozen=True, kw_only=True, eq=False)
class Moment:
    """What a rank holds after ``step`` steps, and the state of its random number generators at that time."""

    step: int
    held: Held
    random: Mapping[str, Any]


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
        pieces = [piece.tensor for piece in moment.held.pieces]
        own = {_STATE: moment.held.state, _RANDOM: dict(moment.random), _PIECES: pieces}
        tensors, skeleton = strip(own, f"rank-{self._rank}")
        about = [
            {"keys": piece.keys, "shape": piece.shape, "box": piece.box, "range": piece.range}
            for piece in moment.held.pieces
        ]
        files = {
            name: record(self._folder / name).model_dump() for name in write_tensors(self._folder, self._rank, tensors)
        }
        content = {**self._about, "step": moment.step, "skeleton": encoded(skeleton), "about": about, "files": files}
        if self._still(moment):
            write_text(self._folder / f"rank-{self._rank}.json", json.dumps(content))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    about: Mapping[str, Any]
    state: Any
    random: dict[str, Any]
    pieces: Sequence[Piece]


def rescued(directory: Path) -> tuple[int | None, str]:
    """Make a checkpoint of what ranks have rescued: of which step, and "". None if that cannot be, with the reason; "" if nothing was
    rescued. The parts are gone then. On one rank.
    """
    folder = directory / _FOLDER
    if not folder.is_dir():
        return None, ""
    try:
        return _assembled(directory, folder), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, CheckpointError) as error:
        return None, " ".join(str(error).split())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _assembled(directory: Path, folder: Path) -> int:
    found = [read_json(path) for path in sorted(folder.glob("rank-*.json"))]
    last = max(found, key=lambda about: (folder / f"rank-{about['rank']}.json").stat().st_mtime, default=None)
    if last is None:
        raise ValueError("the ranks were in the middle of an update")
    abouts = {about["rank"]: about for about in found if about["run"] == last["run"]}
    missing = [str(rank) for rank in range(last["size"]) if rank not in abouts]
    if missing:
        raise ValueError(
            f"of rank {', '.join(missing)} there is nothing: it was in the middle of an update, or was killed"
        )
    steps = {about["step"] for about in abouts.values()}
    if len(steps) > 1:
        raise ValueError(f"some ranks were behind step {min(steps)}, others behind step {max(steps)}")
    parts = [_part(folder, about) for _, about in sorted(abouts.items())]
    state = merged([part.state for part in parts])
    for keys, tensor in joined(piece for part in parts for piece in part.pieces).items():
        place = state
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = tensor
    step: int = last["step"]
    Checkpoints(directory).save(
        step,
        state,
        identity=last["identity"],
        plan=last["plan"],
        generators={str(part.about["rank"]): part.random for part in parts},
    )
    return step


def _part(folder: Path, about: Mapping[str, Any]) -> _Part:
    for name, written in about["files"].items():
        if record(folder / name) != FileRecord(**written):
            raise ValueError(f"{name} has another content than was written")
    tensors, _ = read_tensors(folder, sorted(about["files"]), lambda _: True)
    own = graft(decoded(about["skeleton"]), tensors)
    return _Part(
        about=about,
        state=own[_STATE],
        random=own[_RANDOM],
        pieces=[_piece(words, tensor) for words, tensor in zip(about["about"], own[_PIECES], strict=True)],
    )


def _piece(words: Mapping[str, Any], tensor: Tensor) -> Piece:
    return Piece(
        keys=tuple(words["keys"]),
        shape=tuple(words["shape"]),
        box=tuple(Slice(*cut) for cut in words["box"]),
        range=None if words["range"] is None else (words["range"][0], words["range"][1]),
        tensor=tensor,
    )
