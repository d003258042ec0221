"""In which order the places of a pipeline compute: as the pipeline says itself, or as the plan's schedule has it."""

from __future__ import annotations

from heterodyne.errors import PlanError
from heterodyne.plan.plan import Pipeline, Plan
from heterodyne.plan.program import Action
from heterodyne.plan.schedules import SCHEDULES, Orders
from heterodyne.plan.schedules.gpipe import GPIPE, stage_by_stage

__all__ = ["is_asynchronous", "orders_of"]


def is_asynchronous(plan: Plan) -> bool:
    """Return whether the plan trains with predicted weights. On one place it does not, whatever its schedule: nothing is ahead there."""
    chosen = SCHEDULES.get(plan.schedule)
    return chosen is not None and chosen.asynchronous and any(len(pipeline.places) > 1 for pipeline in plan.pipelines)


def orders_of(schedule: str, pipeline: Pipeline) -> Orders:
    """The orders of a pipeline. Raises PlanError for an action that is none, or a schedule that does not suit its stages."""
    places, micro_batches = len(pipeline.places), len(pipeline.micro_batches)
    if pipeline.order:
        return _own_orders(pipeline)
    if schedule not in SCHEDULES:
        raise PlanError(f"schedule {schedule!r} is not known; it can be {', '.join(SCHEDULES)}")
    chosen = SCHEDULES[schedule]
    if len(pipeline.stages) == 1 and chosen.chunks not in (None, 1):
        chosen = SCHEDULES["1F1B"]  # a model in one piece has nothing to order, whatever other pipelines of the plan do
    if chosen is GPIPE:
        return stage_by_stage(pipeline.place_of_stage, micro_batches)
    chunks, uneven = divmod(len(pipeline.stages), max(1, places))
    if uneven:
        raise PlanError(
            f"{schedule} needs as many stages on each place as on the others; {len(pipeline.stages)} stages cannot be "
            f"spread so over {places} places: cut the model into {chunks * places} or {(chunks + 1) * places} stages, "
            "or give the pipeline an order of its own"
        )
    orders = chosen.orders(places, chunks, micro_batches)
    if pipeline.place_of_stage != chosen.stage_places(places, chunks):
        raise PlanError(
            f"{schedule} has its stages on the places {_list(chosen.stage_places(places, chunks))}, "
            f"the pipeline on {_list(pipeline.place_of_stage)}: give the stages' devices in that order, "
            "or choose another schedule"
        )
    return orders


def _own_orders(pipeline: Pipeline) -> Orders:
    """Return what a pipeline says itself: a line for each place, of the stages that are on it."""
    try:
        orders = tuple(tuple(map(Action.parse, line.split())) for line in pipeline.order)
    except ValueError as error:
        raise PlanError(f"order: {error}") from error
    places = pipeline.places
    if len(orders) != len(places):
        raise PlanError(f"order: lines {len(orders)}, places {len(places)}: write one line for each place")
    homes = pipeline.place_of_stage
    for place, order in enumerate(orders):
        for action in order:
            if not 0 <= action.stage < len(homes) or homes[action.stage] != place:
                own = _list(tuple(stage for stage, home in enumerate(homes) if home == place))
                raise PlanError(
                    f"order: place {place} ({', '.join(places[place])}) has {action}, and its stages are {own}"
                )
    return orders


def _list(places: tuple[int, ...]) -> str:
    return ", ".join(map(str, places))
