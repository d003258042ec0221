"""Workers that the kernel has killed for want of memory (SIGKILL): nobody else can tell what happened to them."""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from pathlib import Path

from heterodyne.cluster.written import cluster_from_json
from heterodyne.errors import HeterodyneError
from heterodyne.plan.plan import Plan
from heterodyne.runtime.records.run_directory import RunDirectory
from heterodyne.runtime.records.shortages import Shortage, note_shortage
from heterodyne.text_files import read_text

__all__ = ["KernelKills"]

_COUNTS = Path("/proc/vmstat")
_KILLED = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class KernelKills:
    """Counted from here on. ``noted``: a worker of the run was among the killed, and what it lacked is in the run directory."""

    def __init__(self, run: RunDirectory, counts: Path = _COUNTS) -> None:
        self._run = run
        self._counts = counts
        self._before = self._count()
        self.noted = False

    def explain(self, rank: int) -> str | None:
        """Of a rank that failed: whether the kernel has killed for want of memory since."""
        if self._count() == self._before:
            return None
        with suppress(HeterodyneError, OSError, ValueError, IndexError):  # the run may have had no plan yet
            self.noted = self._note(rank)
        return "the kernel has killed a process for want of memory"

    def _note(self, rank: int) -> bool:
        """Whether it was known what the plan asked of this rank's device."""
        plan, device = Plan.load(self._run.plan), cluster_from_json(read_text(self._run.cluster)).devices[rank].id
        predicted = 0 if plan.predicted is None else plan.predicted.memory_bytes.get(device, 0)
        if not predicted:
            return False
        # How much it had is not known; so much is: it was not enough for this plan.
        shortage = Shortage(
            device=device,
            rank=rank,
            step=None,
            where="a step, in which the kernel killed it",
            used_bytes=predicted - 1,
            asked_bytes=1,
            free_bytes=0,
            predicted_bytes=predicted,
            longer=False,
            attempt=secrets.token_hex(4),
        )
        note_shortage(self._run.shortages, shortage)
        return True

    def _count(self) -> int:
        try:
            found = _KILLED.search(self._counts.read_text())
        except OSError:
            return 0
        return int(found[1]) if found else 0
