"""The directory of one run, and that no run ever writes over another.

runs/NAME/
  job.yaml  cluster.json  out-of-memory.jsonl  profile.json  candidates.json  plan.json  metrics.jsonl  timeline-*.jsonl  summary.json
  speeds.json  checkpoint/step-N/   logs/   tensorboard/   model/
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from heterodyne.errors import CheckpointError, HeterodyneError

__all__ = ["RUNS", "RunDirectory"]

RUNS = Path("runs")
"""Where runs are that nobody has named a directory for."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The places inside of a run directory."""

    path: Path

    @property
    def job(self) -> Path:
        return self.path / "job.yaml"

    @property
    def cluster(self) -> Path:
        return self.path / "cluster.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def profile(self) -> Path:
        return self.path / "profile.json"

    @property
    def candidates(self) -> Path:
        return self.path / "candidates.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def speeds(self) -> Path:
        return self.path / "speeds.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def shortages(self) -> Path:
        return self.path / "out-of-memory.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def written_by_rank0(self) -> tuple[Path, ...]:
        """Return the files that one rank writes, and reads when the run goes on."""
        of_planning = (self.job, self.cluster, self.plan, self.profile, self.candidates, self.timeline("simulated"))
        return (*of_planning, self.metrics, self.speeds, self.summary)

    def timeline(self, origin: str) -> Path:
        """Return the file of the timeline of that origin, ``measured`` or ``simulated``."""
        return self.path / f"timeline-{origin}.jsonl"

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """A new run in a directory that is not there yet or empty. Raises HeterodyneError if it holds anything."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            taken = next(path.iterdir(), None)
        except OSError as error:
            raise HeterodyneError(
                f"the run directory {path} cannot be made ({error.strerror}); choose another (--run-dir; run= in a loop)"
            ) from error
        if taken is not None:
            raise HeterodyneError(
                f"{path} is not empty (it holds {taken.name}): continue the run in it with --resume (resume=True in a loop), or choose "
                "another --run-dir"
            )
        return cls(path)

    @classmethod
    def create_next(cls, runs: Path, name: str, *, above: int = 0) -> RunDirectory:
        """A new run ``NAME-N``, N being the first number that is free; two that start at the same time get two numbers.

        ``above``: a number that is taken on another disk.
        """
        name = _plain(name)
        for number in count(1 + max(above, cls.last_number(runs, name))):
            path = runs / f"{name}-{number}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise HeterodyneError(
                    f"the run directory {path} cannot be made ({error.strerror}); choose another (--run-dir; run= in a loop)"
                ) from error
            return cls(path)
        raise AssertionError("there is always another number")

    @classmethod
    def last_number(cls, runs: Path, name: str) -> int:
        """The largest N of the runs ``NAME-N``; 0 if there is none."""
        pattern = re.compile(re.escape(_plain(name)) + r"-([0-9]+)")
        entries = runs.iterdir() if runs.is_dir() else ()
        return max((int(match[1]) for path in entries if (match := pattern.fullmatch(path.name))), default=0)

    @classmethod
    def existing(cls, path: Path) -> RunDirectory:
        """A run to continue, even one that was killed before it had written anything. Raises CheckpointError if it is none."""
        found = cls(path)
        signs = (found.job, found.plan, found.metrics, found.checkpoints, found.shortages)
        if not path.is_dir() or (any(path.iterdir()) and not any(sign.exists() for sign in signs)):
            raise CheckpointError(
                f"there is nothing to resume: {path} is no run directory; name one with --run-dir, or leave --resume out"
            )
        return found

    def require_unbegun(self) -> None:
        """Raises CheckpointError where a run that has no checkpoints had come so far that it had some: to begin again would replace its
        metrics.
        """
        if self.checkpoints.is_symlink() and not self.checkpoints.exists():
            raise CheckpointError(
                f"{self.checkpoints} leads to {self.checkpoints.readlink()}, which is not there: mount the disk, or remove the link and "
                "metrics.jsonl to begin again"
            )
        if self.summary.exists():
            raise CheckpointError(
                f"{self.path} holds a run that has ended ({self.summary.name}), and its checkpoints are gone: put them back to "
                f"{self.checkpoints}, or move {self.summary.name} away to begin again"
            )

    @classmethod
    def latest(cls, runs: Path, name: str) -> RunDirectory:
        """The run ``NAME-N`` of the largest N, to continue it. Raises CheckpointError if there is none."""
        return cls.existing(cls.numbered(runs, name, cls.last_number(runs, name)))

    @staticmethod
    def numbered(runs: Path, name: str, number: int) -> Path:
        """Return where the run ``NAME-number`` is. Raises CheckpointError for number 0."""
        if not number:
            raise CheckpointError(f"there is nothing to resume: no run {name}-N in {runs}; name one with --run-dir")
        return runs / f"{_plain(name)}-{number}"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
