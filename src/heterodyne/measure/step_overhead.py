"""What a step takes besides passes and update: the batch is cut, gradients are handed over one by one, the loss is read, Python goes from
action to action.

The device trains the whole model by itself for some steps, as the runtime does it, and runs forward and backward by themselves in turns
with them, so that both meet the same moments of the machine; the difference, less the update, belongs to no action.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median
from typing import Final, TypeAlias

from heterodyne.measure.block_run import BlockProgram
from heterodyne.measure.clock import HostClock, Mark, ProcessorClock, Stopwatch
from heterodyne.measure.notes import words_of
from heterodyne.measure.sampling import sample
from heterodyne.measure.workbench import Workbench

__all__ = ["LoneSteps", "measure_step_overhead"]

_LEAST_S: Final = 1e-6
LoneSteps: TypeAlias = Callable[[int], AbstractContextManager[Callable[[], object]]]
"""For a batch of so many samples: what trains the model on this device alone for a step, each time that it is called."""


def measure_step_overhead(
    program: BlockProgram | None,
    steps: LoneSteps,
    size: int,
    bench: Workbench,
    *,
    update_s: float,
    budget_s: float = 5.0,
) -> float:
    """Seconds of a step of ``program``, the whole model, that belong to no action; 0 where it is None, because it does
    not fit here.

    ``size``: samples of its one micro-batch; ``update_s``: of the optimizer. Collective: all devices do it at the same time.

    It is a small difference of two long times. So of work on a processor the processor's time is taken, which does not count what others do
    there, and becomes seconds at the pace of the passes.
    """
    seconds = 0.0
    beside: Callable[[], object] | None = None
    bench.meet()
    bench.progress("what a step takes besides", 1, 1)
    try:
        if program is not None:
            with steps(size) as train:
                run = bench.run_of(program, size)
                own = bench.stopwatch
                clock: Stopwatch = ProcessorClock() if isinstance(own, HostClock) else own
                paces: list[float] = []

                def both() -> tuple[Mark, ...]:
                    start = clock.mark()
                    train()
                    middle, began = clock.mark(), own.mark()
                    run()
                    end, ended = clock.mark(), own.mark()
                    if clock is not own:
                        paces.append(own.seconds(began, ended) / max(clock.seconds(middle, end), _LEAST_S))
                    return start, middle, end

                step_s, passes_s = sample(both, clock, bench.sampling, budget_s=budget_s).laps
                pace = median(paces) if paces else 1.0
                seconds, beside = max(0.0, pace * (step_s - passes_s) - update_s), run
    except Exception as error:  # noqa: BLE001  # the plan is a little less well predicted, and nothing else
        bench.say(f"what a step takes besides its passes and its update was not measured: {words_of(error)}")
    bench.meet(beside)
    return seconds
