"""Seconds and bytes of every kind of block at several micro-batch sizes on the device of this rank.

All ranks measure at the same time, section by section, since in training they compute at the same time too and share
memory bandwidth, caches and power. The sections are the same on every rank, what happens inside one is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from heterodyne.cluster.profile import BlockSample
from heterodyne.errors import MeasureError
from heterodyne.measure.block_run import BlockProgram, BlockRun, Precision
from heterodyne.measure.clock import Clock, clock_of
from heterodyne.measure.sampling import Sampling, Timing, sample

__all__ = ["WHOLE", "Workbench", "extrapolate", "measure_blocks", "measure_optimizer"]

WHOLE = "*"


def _quiet(message: str) -> None:  # noqa: ARG001  # the default: nobody listens
    return


def _no_progress(what: str, done: int, total: int) -> None:  # noqa: ARG001
    return


def _alone() -> None:
    return


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """Where and how a rank measures.

    Args:
        device: where tensors live.
        precision: ``bf16`` is autocast.
        sampling: how much is enough.
        clock: of the device; None: the right one for it.
        now: seconds of wall time, for the budget.
        barrier: all ranks meet here before each section.
        say: is told what was left out and why.
        progress: (what, done, total), for a bar.
        seed: of weights and inputs.
    """

    device: torch.device
    precision: Precision = "fp32"
    sampling: Sampling = field(default_factory=Sampling)
    clock: Clock | None = None
    now: Callable[[], float] = time.monotonic
    barrier: Callable[[], None] = _alone
    say: Callable[[str], None] = _quiet
    progress: Callable[[str, int, int], None] = _no_progress
    seed: int = 0

    @property
    def stopwatch(self) -> Clock:
        return self.clock or clock_of(self.device)

    def run_of(self, program: BlockProgram, size: int) -> BlockRun:
        return BlockRun(program, size, self.device, precision=self.precision, seed=self.seed, clock=self.stopwatch)

    def time(self, run: BlockRun, *, budget_s: float = float("inf")) -> Timing:
        """Laps: forward, the gap between (not counted), backward."""
        return sample(run, self.stopwatch, self.sampling, budget_s=budget_s)

    def meet(self, run: BlockRun | None) -> None:
        """Meet the other ranks, computing until the last one comes: the slow ones are timed beside busy neighbours too."""
        if run is None:
            self.barrier()
            return
        with ThreadPoolExecutor(1, thread_name_prefix="barrier") as thread:
            waiting = thread.submit(self.barrier)
            while not waiting.done():
                run()
            waiting.result()


def measure_blocks(
    programs: Mapping[str, BlockProgram],
    micro_batch_sizes: Sequence[int],
    bench: Workbench,
    *,
    budget_s: float = 60.0,
    memory_bytes: int | None = None,
    needs: Callable[[str, int], float] | None = None,
) -> dict[str, tuple[BlockSample, ...]]:
    """Samples of each kind, by rising size.

    Args:
        programs: what to measure, by kind, the same kinds in the same order on every rank. ``*`` is the whole model; it is left out
            where it does not fit.
        micro_batch_sizes: the same on every rank.
        budget_s: about the seconds that this may take; small sizes come first, and what is left out is continued from them.
        memory_bytes, needs: what the device has, and an estimate of what a kind needs at a size; more than there is is not tried.

    Raises MeasureError if a kind other than ``*`` cannot be measured at any size.
    """
    sizes = sorted(set(micro_batch_sizes))
    measured: dict[str, list[BlockSample]] = {kind: [] for kind in programs}
    reasons: dict[str, str] = {}
    sections = [(size, kind) for size in sizes for kind in programs if kind != WHOLE or size == whole_size(sizes)]
    deadline = bench.now() + budget_s
    for index, (size, kind) in enumerate(sections):
        bench.progress(f"{kind} x {size}", index, len(sections))
        bench.meet(None)
        run: BlockRun | None = None
        left_s = deadline - bench.now()
        skipped = kind in reasons
        reason = None if skipped else _reason_to_skip(kind, size, measured[kind], bench, left_s, memory_bytes, needs)
        if reason is None and not skipped:
            share = size / sum(s for s, _ in sections[index:])
            try:
                run = bench.run_of(programs[kind], size)
                measured[kind].append(_measure_one(run, size, bench, left_s * share))
            except (RuntimeError, MemoryError, MeasureError) as error:
                # Kept until the end: the other ranks wait at the next barrier.
                reason, run = _failure(error), None
            if reason is not None and bench.device.type != "cpu":
                torch.accelerator.empty_cache()
        if reason is not None:
            reasons[kind] = f"{reason} at size {size}"
        bench.meet(run)
    bench.progress("blocks", len(sections), len(sections))
    return {kind: result for kind, result in _completed(measured, sizes, reasons, bench) if result}


def measure_optimizer(
    shapes: Sequence[Sequence[int]],
    name: str,
    bench: Workbench,
    *,
    budget_s: float = 10.0,
    most_bytes: int = 256 * 2**20,
) -> float:
    """Seconds of one step of AdamW (``adamw``) or SGD with momentum (``sgd``) per byte of fp32 parameters.

    Real tensors of the given shapes, up to ``most_bytes`` of them (four times that with gradients and states): beyond the
    caches, bytes are what counts.
    """
    generator = torch.Generator(bench.device).manual_seed(bench.seed)
    parameters: list[torch.nn.Parameter] = []
    total = 0
    for shape in shapes:
        bytes_here = 4 * torch.Size(shape).numel()
        if total and total + bytes_here > most_bytes:
            continue
        parameter = torch.nn.Parameter(torch.zeros(tuple(shape), device=bench.device))
        parameter.grad = torch.empty_like(parameter).normal_(generator=generator)
        parameters.append(parameter)
        total += bytes_here
    if total == 0:
        return 0.0
    # A learning rate of almost nothing: the weights stay in the range of ordinary numbers however often this is repeated.
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters, lr=1e-8, fused=True)
        if name == "adamw"
        else torch.optim.SGD(parameters, lr=1e-8, momentum=0.9, fused=True)
    )
    clock = bench.stopwatch

    def step() -> tuple[object, ...]:
        start = clock.mark()
        optimizer.step()
        return start, clock.mark()

    bench.barrier()
    return sample(step, clock, bench.sampling, budget_s=budget_s).seconds / total


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

    return BlockSample(
        micro_batch_size=size,
        forward_s=onward("forward_s"),
        backward_s=onward("backward_s"),
        spread=max(s.spread for s in samples),
        saved_bytes=round(onward("saved_bytes")),
        peak_bytes=round(onward("peak_bytes")),
        extrapolated=True,
    )


def whole_size(sizes: Sequence[int]) -> int:
    """At which of the sizes the whole model is measured: one tells how far it is from the sum of its blocks."""
    return sorted(sizes)[len(sizes) // 2]


def _measure_one(run: BlockRun, size: int, bench: Workbench, budget_s: float) -> BlockSample:
    kept, peak = run.memory()
    timing = bench.time(run, budget_s=budget_s)
    forward, _, backward = timing.laps
    return BlockSample(
        micro_batch_size=size,
        forward_s=forward,
        backward_s=backward,
        spread=timing.spread,
        saved_bytes=kept,
        peak_bytes=peak,
    )


def _reason_to_skip(
    kind: str,
    size: int,
    before: Sequence[BlockSample],
    bench: Workbench,
    left_s: float,
    memory_bytes: int | None,
    needs: Callable[[str, int], float] | None,
) -> str | None:
    if memory_bytes is not None and needs is not None and needs(kind, size) > memory_bytes:
        return f"it needs about {needs(kind, size) / 2**30:.1f} GiB of {memory_bytes / 2**30:.1f} GiB"
    if not before:
        return None
    expected = extrapolate(before, size)
    run_s = expected.forward_s + expected.backward_s
    runs = 2 + bench.sampling.warm_up + 1  # two for the memory, and one whole sample
    return None if runs * run_s <= left_s else "the time for measuring is used up"


def _failure(error: Exception) -> str:
    """What went wrong in a section. Raises the error again if it is the block's own and not the device's."""
    if isinstance(error, MeasureError):
        return str(error)
    full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)
    if not full:
        raise error
    return "the device is out of memory"


def _completed(
    measured: Mapping[str, Sequence[BlockSample]], sizes: Sequence[int], reasons: Mapping[str, str], bench: Workbench
) -> Iterator[tuple[str, tuple[BlockSample, ...]]]:
    for kind, samples in measured.items():
        if not samples and kind == WHOLE:
            bench.say(f"the whole model was not measured in one piece: {reasons[kind]}")
        elif not samples:
            raise MeasureError(f"block kind {kind} cannot be measured on {bench.device}: {reasons[kind]}")
        wanted = [whole_size(sizes)] if kind == WHOLE else sizes
        missing = [size for size in wanted if samples and size > samples[-1].micro_batch_size]
        if missing:
            name = "the whole model" if kind == WHOLE else f"block kind {kind}"
            bench.say(
                f"{name} was not measured at sizes {missing} but continued from the smaller ones: {reasons[kind]}"
            )
        yield kind, (*samples, *(extrapolate(samples, size) for size in missing))
