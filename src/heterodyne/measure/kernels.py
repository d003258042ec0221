"""Seconds and bytes of every kind of block at several micro-batch sizes on the device of this rank.

All ranks measure at the same time, section by section (one kind at one size). The sections are the same on every rank and
all ranks meet after each, whatever one of them leaves out; what happens inside a section is not the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from heterodyne.cluster.profile import WHOLE, BlockSample
from heterodyne.errors import MeasureError
from heterodyne.measure.block_run import BlockProgram, BlockRun, Halves
from heterodyne.measure.notes import words_of
from heterodyne.measure.workbench import Workbench
from heterodyne.units import format_bytes

__all__ = ["extrapolate", "measure_blocks", "whole_sizes"]

_MOST_LENIENCY = 5.0
_TWICE = 2  # once may be a moment in which others were busy
_MEMORY_RUNS = 2  # what looking at the memory of a block takes; less on a CPU, more elsewhere


def measure_blocks(
    programs: Mapping[str, BlockProgram],
    micro_batch_sizes: Sequence[int],
    bench: Workbench,
    *,
    while_faster: bool = False,
    budget_s: float = 60.0,
    memory_bytes: int | None = None,
    needs: Callable[[str, int], float] | None = None,
    counts: Mapping[str, int] | None = None,
    worth_s: Callable[[float], float] | None = None,
) -> dict[str, tuple[BlockSample, ...]]:
    """Samples of each kind, by rising size.

    Args:
        programs: what to measure, by kind, the same kinds in the same order on every rank. ``*`` is the whole model, measured at
            `whole_sizes` only; it is left out where it does not fit into memory or time.
        micro_batch_sizes: the same on every rank.
        while_faster: a rank measures no larger sizes once it gained nothing twice, that is, a sample takes no less time in them; what
            the others still measure is continued there in proportion. Once no rank gains, no larger sizes are looked at.
        budget_s: about the seconds that this may take, without those of a compiler; small sizes come first, and what is left out is
            continued from them.
        memory_bytes, needs: what the device has, and an estimate of what a kind needs at a size; more than there is is not tried.
        counts: how many blocks of each kind the model has, once each if not given: the time of the whole is expected from it.
        worth_s: given the seconds of a sample in all blocks together, the budget from then on. Collective, if it is so on one rank.

    Raises MeasureError, on every rank alike, if on any of them a kind other than ``*`` cannot be measured at the smallest size,
    or something fails that is not for lack of memory or time.
    """
    sizes = sorted(set(micro_batch_sizes))
    survey = _Survey(programs, bench, memory_bytes, needs, dict.fromkeys(programs, 1) if counts is None else counts)
    parts = [kind for kind in programs if kind != WHOLE]
    began_s = bench.now()
    deadline = began_s + budget_s
    done: list[int] = []
    number = 0

    def measured(kind: str, size: int, ahead: Sequence[tuple[str, int]]) -> None:
        """One section; ``ahead``: those that share with it the time that is left."""
        nonlocal number
        number += 1
        bench.progress(f"{bench.name_of(kind)} at {_samples(size)}", number, number + len(ahead))
        work = [size * survey.blocks_in(kind) for kind, size in ((kind, size), *ahead)]
        left_s = deadline + survey.compiling_s - bench.now()
        failure = survey.section(kind, size, left_s, work[0] / sum(work))
        bench.meet(survey.run, failure=failure, cause=survey.cause)

    bench.meet()
    for index, size in enumerate(sizes):
        # Who may stop after each size does not count on more than the next one.
        later = sizes[index + 1 : index + 2] if while_faster else sizes[index + 1 :]
        wholes = [(WHOLE, at) for at in whole_sizes([*done, size, *later]) if WHOLE in programs and at > sizes[0]]
        kinds = list(programs) if not done else parts
        for place, kind in enumerate(kinds):
            ahead = [(kind, size) for kind in kinds[place + 1 :]] + [(kind, at) for at in later for kind in parts]
            measured(kind, size, ahead + wholes)
        done.append(size)
        if worth_s is not None and len(done) == 1:
            deadline = began_s + worth_s(survey.blocks_s(size) / size)
        if while_faster and later and not bench.any_of(survey.goes_on_after(size), survey.run):
            break
    left = whole_sizes(done)[1:] if WHOLE in programs else ()
    for place, at in enumerate(left):
        measured(WHOLE, at, [(WHOLE, later_size) for later_size in left[place + 1 :]])
    survey.let_go()
    return survey.completed(done)


def extrapolate(samples: Sequence[BlockSample], size: int) -> BlockSample:
    """A sample for a larger size: affine through the last two, in proportion if there is one; never less than the last."""
    last = samples[-1]

    def onward(field_name: str) -> float:
        value = float(getattr(last, field_name))
        if len(samples) == 1:
            return value * size / last.micro_batch_size
        before = samples[-2]
        slope = (value - float(getattr(before, field_name))) / (last.micro_batch_size - before.micro_batch_size)
        return value + max(0.0, slope) * (size - last.micro_batch_size)

    # What does not grow with the batch must not grow here, where there is but one sample to go by.
    fixed = last.copied_bytes if len(samples) == 1 else 0
    return BlockSample(
        micro_batch_size=size,
        forward_s=onward("forward_s"),
        backward_s=onward("backward_s"),
        spread=max(s.spread for s in samples),
        saved_bytes=round(onward("saved_bytes")),
        copied_bytes=last.copied_bytes,
        peak_bytes=round(onward("peak_bytes") - fixed * (size / last.micro_batch_size - 1)),
        extrapolated=True,
        input_s=onward("input_s"),
        weight_s=onward("weight_s"),
        halved_forward_s=onward("halved_forward_s"),
    )


def whole_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """At which of the sizes the whole model is measured: the smallest, the middle one and the largest tell how far it is from the sum of
    its blocks, and how that changes. A small micro-batch in a block by itself costs more than in the model."""
    ordered = sorted(set(sizes))
    return tuple(dict.fromkeys((ordered[0], ordered[len(ordered) // 2], ordered[-1])))


class _Survey:
    """What one rank has measured, what it left out and why, and the work with which it keeps the others company."""

    def __init__(
        self,
        programs: Mapping[str, BlockProgram],
        bench: Workbench,
        memory_bytes: int | None,
        needs: Callable[[str, int], float] | None,
        counts: Mapping[str, int],
    ) -> None:
        self.run: BlockRun | None = None
        self.cause: Exception | None = None
        self.compiling_s = 0.0
        self._programs = programs
        self._bench = bench
        self._memory_bytes = memory_bytes
        self._needs = needs
        self._counts = {kind: counts.get(kind, 1) for kind in programs if kind != WHOLE}
        self._measured: dict[str, list[BlockSample]] = {kind: [] for kind in programs}
        self._reasons: dict[str, str] = {}
        self._in_vain = 0
        self._enough = 0  # the size after which nothing is gained; 0: there may be more to gain

    def let_go(self) -> None:
        """Let go of what was run last, with all its memory."""
        if self.run is not None:
            self.run.let_go()
        self.run = None

    def blocks_in(self, kind: str) -> int:
        """Return how many blocks one run of that kind is."""
        return max(1, sum(self._counts.values())) if kind == WHOLE else 1

    def section(self, kind: str, size: int, left_s: float, share: float) -> str | None:
        """Measure a kind at a size, or keep the reason why not. A text if that is the end of the measurement for all ranks.

        Once this rank gains nothing by larger sizes, its blocks are measured at no more of them, and the whole model at the largest so far.

        Args:
            left_s: seconds that are left of the budget.
            share: the part of them that this section may take.
        """
        if self._enough:
            size = min(size, self._enough)
            if any(sample.micro_batch_size == size for sample in self._measured[kind]):
                return None
        if kind in self._reasons:
            return None
        reason = self._too_large(kind, size) or self._too_long(kind, size, left_s)
        if reason is None:
            self.let_go()
            try:
                began_s = self._bench.now()
                self.run = self._bench.run_of(self._programs[kind], size)
                if self._bench.compile is not None:
                    self.compiling_s += self._bench.now() - began_s
                leniency = self._leniency(kind, size)
                samples = self._measured[kind]
                samples.append(_measure_one(self.run, size, self._bench, left_s * share, leniency))
                if kind != WHOLE and self._bench.halves is not None:
                    halves = self._bench.halves
                    samples[-1] = _with_halves(samples[-1], self.run, halves, self._bench, left_s * share, leniency)
                return None
            except Exception as error:  # noqa: BLE001  # whatever it is, the others wait for the outcome
                self.let_go()
                reason = _lack(error)
                if reason is None:
                    self.cause = error
                    return f"{self._bench.name_of(kind)} at {_samples(size)} failed: {words_of(error)}"
            _free_memory(self._bench.device)
        self._reasons[kind] = reason
        if kind == WHOLE or self._measured[kind]:
            return None
        return f"{self._bench.name_of(kind)} cannot be measured even at {_samples(size)}: {reason}"

    def blocks_s(self, size: int) -> float:
        """The seconds of all blocks together, forward and backward."""
        return self._expected_s(WHOLE, size)

    def goes_on_after(self, size: int) -> bool:
        """Return whether this rank wants to measure larger sizes; never again after two in a row by which it gains nothing."""
        if not self._enough:
            self._in_vain = 0 if self._gains(size) else self._in_vain + 1
            self._enough = size if self._in_vain == _TWICE else 0
        return not self._enough

    def _gains(self, size: int) -> bool:
        """Return whether a sample takes less time at that size than at the one before, by more than measuring can tell; yes at the
        first."""
        seconds = []
        for kind, count in self._counts.items():
            samples = self._measured[kind]
            if kind in self._reasons or samples[-1].micro_batch_size != size:
                return False
            if len(samples) == 1:
                return True
            seconds.append([count * (s.forward_s + s.backward_s) / s.micro_batch_size for s in samples[-2:]])
        before, now = map(sum, zip(*seconds, strict=True))
        return now < before * (1 - self._bench.sampling.steady)

    def completed(self, sizes: Sequence[int]) -> dict[str, tuple[BlockSample, ...]]:
        """All samples, larger sizes continued from those that were measured; what was left out is said, once for each reason."""
        left_out: dict[str, list[str]] = {}
        result: dict[str, tuple[BlockSample, ...]] = {}
        for kind, samples in self._measured.items():
            missing = [] if kind == WHOLE else [size for size in sizes if size > samples[-1].micro_batch_size]
            if samples:
                known = (
                    samples if not self._enough else samples[:: max(1, len(samples) - 1)]
                )  # no curve: the ends tell the line best
                result[kind] = (*samples, *(extrapolate(known, size) for size in missing))
            if kind in self._reasons:
                name = self._bench.name_of(kind)
                what = f"{name} at {_samples(*missing)}: extrapolated" if missing else f"{name}: left out"
                left_out.setdefault(self._reasons[kind], []).append(what)
        for reason, items in left_out.items():
            self._bench.say(f"{reason}: {'; '.join(items)}")
        return result

    def _too_large(self, kind: str, size: int) -> str | None:
        if self._memory_bytes is None or self._needs is None:
            return None
        needed = self._needs(kind, size)
        if needed <= self._memory_bytes:
            return None
        return f"the device has {format_bytes(self._memory_bytes)} of memory left and not the {format_bytes(needed)} that it takes"

    def _too_long(self, kind: str, size: int, left_s: float) -> str | None:
        run_s = self._expected_s(kind, size)
        least_s = _MEMORY_RUNS * run_s + self._bench.sampling.least_s(run_s)
        return None if run_s == 0 or least_s <= left_s else "the time for measuring is used up"

    def _leniency(self, kind: str, size: int) -> float:
        """Return how much less well a kind may be known that is a small part of the whole: what counts is the error of the sum."""
        part_s = self._counts.get(kind, 0) * self._expected_s(kind, size)
        whole_s = self._expected_s(WHOLE, size)
        return min(_MOST_LENIENCY, whole_s / part_s) if part_s > 0 else 1.0

    def _expected_s(self, kind: str, size: int) -> float:
        """Seconds of one run, from what is known: of the whole from its blocks, of a block from its smaller sizes; 0: unknown."""
        if kind == WHOLE:
            return sum(count * self._expected_s(part, size) for part, count in self._counts.items())
        before = self._measured[kind]
        if not before:
            return 0.0
        sample = before[-1] if before[-1].micro_batch_size == size else extrapolate(before, size)
        return sample.forward_s + sample.backward_s


def _measure_one(run: BlockRun, size: int, bench: Workbench, budget_s: float, leniency: float) -> BlockSample:
    (kept, copied), peak, run_s = run.memory()
    timing = bench.time(run, budget_s=budget_s, run_s=run_s, leniency=leniency)
    forward, _, backward = timing.laps
    return BlockSample(
        micro_batch_size=size,
        forward_s=forward,
        backward_s=backward,
        spread=timing.spread,
        saved_bytes=kept,
        copied_bytes=copied,
        peak_bytes=peak,
    )


def _with_halves(
    sample: BlockSample, run: BlockRun, halves: Callable[[], Halves], bench: Workbench, budget_s: float, leniency: float
) -> BlockSample:
    run_s = sample.forward_s + sample.backward_s
    timing = bench.time(lambda: run.halved(halves), budget_s=budget_s / 2, run_s=run_s, leniency=leniency)
    forward, _, inputs, weights = timing.laps
    return replace(sample, halved_forward_s=forward, input_s=inputs, weight_s=weights)


def _lack(error: Exception) -> str | None:
    """Return what the device lacks, if that is what the error says; None for an error of the block itself."""
    if isinstance(error, MeasureError):
        return str(error)
    full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)
    return "the device is out of memory" if full else None


def _free_memory(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def _samples(*sizes: int) -> str:
    """``1 sample``, ``2, 4 and 8 samples``."""
    *others, last = map(str, sizes)
    return f"{' and '.join([', '.join(others), last] if others else [last])} {'sample' if sizes == (1,) else 'samples'}"
