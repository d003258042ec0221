"""Pipelines that are not flushed between steps: no device waits for a batch to end, so the slowest stage decides, and small micro-batches
cost no bubble. Each number of devices and size of micro-batches has its own shortest cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError, PlanError
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Pipeline
from heterodyne.plan.schedules.asynchronous import ASYNCHRONOUS, ahead
from heterodyne.search.finer_cuts import FinerCuts
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.planned import Candidate
from heterodyne.search.predict import plan_of, predict, weighed

__all__ = ["asynchronous"]


def asynchronous(
    model: CostModel, runs: Mapping[str, MicroBatchChoice], sizes: Sequence[int], samples: int
) -> Iterator[Candidate]:
    """Yield candidates with predicted weights, one device a stage, each weighed by its period: with as many micro-batches in flight as 1F1B
    has, and with twice as many, behind which messages hide.
    """
    cuts = FinerCuts(model=model, tied_together=True)
    if len(cuts.points) < 3:  # nothing is left to cut, and what is refused then says why
        cuts = FinerCuts(model=model)
    ranked = sorted((d.id for d in model.cluster.devices), key=lambda device: -model.compute[device].rate())
    counts = {len(ranked), len(ranked) - 1, len(ranked) // 2, min(2, len(ranked))} - {0, 1}
    for count in sorted(counts, reverse=True):
        line = [device.id for device in model.cluster.devices if device.id in ranked[:count]]
        for size in sizes:
            micro_batches = MicroBatches.of_samples(samples, size)
            if len(micro_batches) < len(line):
                continue
            shapes = dict.fromkeys(filter(_is_plain, cuts.shapes(cuts.even(line, micro_batches))))
            for times, how in ((1, ""), (2, ", twice as far ahead")):  # which of them waits less a rehearsal shows
                name = f"{count} stages that are not flushed, micro-batches of {size}{how}"
                tried = [_weighed(model, runs, shape, name, times) for shape in shapes]
                if tried:
                    yield min(tried, key=lambda candidate: candidate.weighed_s)
    if not any(len(MicroBatches.of_samples(samples, size)) > 1 for size in sizes) or len(ranked) < 2:
        yield Candidate(
            name="a pipeline that is not flushed",
            kind="pipeline",
            why_not="takes two devices and two micro-batches at least",
        )


def _is_plain(shape: Pipeline) -> bool:
    """Return whether each place has one stage."""
    return len(shape.places) == len(shape.stages)


def _weighed(
    model: CostModel, runs: Mapping[str, MicroBatchChoice], shape: Pipeline, name: str, times: int
) -> Candidate:
    places, count = len(shape.places), len(shape.micro_batches)
    rows = [ahead(place, times * (places - 1 - place), count) for place in range(places)]
    order = tuple(" ".join(map(str, row)) for row in rows) if times > 1 else ()
    made = shape.model_copy(update={"order": order})
    plan = plan_of(model, shape.micro_batches.samples, (made,), ASYNCHRONOUS.name)
    try:
        return weighed(model, name, "pipeline", *predict(model, plan, runs))
    except (PlanError, InfeasibleError) as error:
        return Candidate(
            name=name, kind="pipeline", why_not=str(error).splitlines()[-1].strip(" -"), left_out=plan.idle
        )
