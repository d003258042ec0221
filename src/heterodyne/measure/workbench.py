"""Where and how a rank measures, and how the ranks keep each other company while they do.

In training all devices compute at the same time and share memory bandwidth, caches and power. A device that is timed while
its neighbours stand idle looks faster than it will be; so whoever is done goes on computing until the last one is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from heterodyne.cluster.profile import WHOLE
from heterodyne.errors import MeasureError
from heterodyne.measure.block_run import BlockProgram, BlockRun, Halves, Precision, Surroundings
from heterodyne.measure.clock import Mark, Stopwatch, clock_of
from heterodyne.measure.notes import told_once
from heterodyne.measure.sampling import Sampling, Timing, sample

__all__ = ["Workbench"]

_GRACE_S = 0.05  # ranks that come at about the same time are not made to wait for a run that may be long

Word = str | None


def _quiet(message: str) -> None:  # noqa: ARG001  # the default: nobody listens
    return


def _no_progress(what: str, number: int, total: int) -> None:  # noqa: ARG001
    return


def _alone(word: Word) -> Sequence[Word]:
    return (word,)


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """Where and how a rank measures.

    Args:
        device: where tensors live.
        precision: ``bf16`` is autocast.
        sampling: how much is enough.
        clock: of the device; None: the right one for it.
        now: seconds of wall time, for the budget.
        gather: all ranks meet here; gives the word of each, in order of rank. Called from another thread while this one computes.
        devices: what each rank's device is called, in order.
        names: what each kind of block is called.
        say: is informed what was left out and why.
        progress: (what is measured now, the how manyth of, how many), for people who wait.
        seed: of weights and inputs.
        halves: makes what splits a backward into halves; None: backwards are measured as a whole only.
        compile: lets what is measured run compiled, as it will in training; None: it runs as it is.
        around: what training puts around a forward and a backward; None: nothing.
    """

    device: torch.device
    precision: Precision = "fp32"
    sampling: Sampling = field(default_factory=Sampling)
    clock: Stopwatch | None = None
    now: Callable[[], float] = time.monotonic
    gather: Callable[[Word], Sequence[Word]] = _alone
    devices: Sequence[str] = ("this device",)
    names: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = _quiet
    progress: Callable[[str, int, int], None] = _no_progress
    seed: int = 0
    halves: Callable[[], Halves] | None = None
    compile: Callable[[nn.Module], None] | None = None
    around: Surroundings | None = None

    @property
    def stopwatch(self) -> Stopwatch:
        return self.clock or clock_of(self.device)

    def name_of(self, kind: str) -> str:
        """Return what people call a kind of block."""
        return "the whole model" if kind == WHOLE else self.names.get(kind, kind)

    def run_of(self, program: BlockProgram, size: int) -> BlockRun:
        return BlockRun(
            program,
            size,
            self.device,
            precision=self.precision,
            seed=self.seed,
            clock=self.stopwatch,
            compile=self.compile,
            around=self.around,
        )

    def time(
        self,
        run: Callable[[], tuple[Mark, ...]],
        *,
        budget_s: float = float("inf"),
        run_s: float = 0.0,
        leniency: float = 1.0,
    ) -> Timing:
        """Laps: forward, the gap between (not counted), backward.

        Args:
            run: called again and again; it returns its marks.
            run_s: seconds of a run before this, 0 if there was none.
            leniency: how many times less steady than usual is steady enough.
        """
        sampling = replace(self.sampling, steady=leniency * self.sampling.steady)
        return sample(run, self.stopwatch, sampling, budget_s=budget_s, run_s=run_s)

    def meet(
        self,
        beside: Callable[[], object] | None = None,
        *,
        failure: str | None = None,
        cause: Exception | None = None,
    ) -> None:
        """Meet the other ranks, computing ``beside`` again and again until the last one comes.

        Raises MeasureError, on every rank alike, if any came with a failure (here because of ``cause``); and whatever ``gather``
        raises.
        """
        words = self.gather(failure) if beside is None else self._gathered(failure, beside)
        failures = told_once(self.devices, [() if word is None else (word,) for word in words])
        if failures:
            raise MeasureError("; ".join(failures)) from cause

    def any_of(self, mine: bool, beside: Callable[[], object] | None = None) -> bool:
        """Return whether it is so on any rank; the same answer on every rank, which compute ``beside`` until the last one comes."""
        word = "yes" if mine else None
        words = self.gather(word) if beside is None else self._gathered(word, beside)
        return any(word is not None for word in words)

    def _gathered(self, word: Word, beside: Callable[[], object]) -> Sequence[Word]:
        answer: Future[Sequence[Word]] = Future()

        def ask() -> None:
            try:
                answer.set_result(self.gather(word))
            except BaseException as error:  # noqa: BLE001  # raised again by result()
                answer.set_exception(error)

        # A daemon: who is interrupted while waiting for others ends, whether they come or not.
        threading.Thread(target=ask, name="heterodyne-meeting", daemon=True).start()
        wait([answer], timeout=_GRACE_S)
        while not answer.done():
            try:
                beside()
                self.stopwatch.wait()  # an accelerator would be given work faster than it does it
            except (RuntimeError, MemoryError):
                # It ran well until now, so something else has taken the memory; the others lose a busy neighbour and nothing more.
                break
        return answer.result()
