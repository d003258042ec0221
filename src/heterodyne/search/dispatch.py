"""Which way tokens go to experts on several hosts: a row for each choice, or once to each host, whichever is cheaper.

A row for each choice takes fewer and simpler steps, once to each host fewer bytes between hosts: slow links decide for the latter.
"""

from __future__ import annotations

from heterodyne.cost.model import CostModel
from heterodyne.graph.cut import stage_ops
from heterodyne.plan.plan import Pipeline, Stage
from heterodyne.search.planned import HOPS_PAY
from heterodyne.search.predict import with_stages

__all__ = ["with_cheaper_dispatch"]


def with_cheaper_dispatch(model: CostModel, pipeline: Pipeline) -> Pipeline:
    """The pipeline with hierarchical all-to-alls in the stages that take less time with them.

    Raises PlanError for what cannot be laid out so, MeasureError if nothing is known of a link.
    """

    def chosen(number: int, stage: Stage) -> Stage:
        nodes = {model.cluster.device(device).node for device in stage.devices}
        mixtures = any(op.kind == "experts" for op in stage_ops(model.graph, *stage.ops))
        if not stage.sharded or not mixtures or len(nodes) == 1:
            return stage.model_copy(update={"hierarchical": False})
        direct, once = (stage.model_copy(update={"hierarchical": each}) for each in (False, True))
        pays = _seconds(model, pipeline, number, once) < HOPS_PAY * _seconds(model, pipeline, number, direct)
        return once if pays else direct

    return with_stages(pipeline, chosen)


def _seconds(model: CostModel, pipeline: Pipeline, number: int, stage: Stage) -> float:
    """Forward and backward of all micro-batches of a step, on the rows of the stage one after the other."""
    changed = with_stages(pipeline, lambda place, own: stage if place == number else own)
    total = 0.0
    for size in pipeline.micro_batches.sizes:
        for row, (_, samples) in enumerate(stage.row_slices(size)):
            cost = model.sharded_stage(changed, number, row)
            if samples and cost is not None:
                total += cost.together_s("F", samples)[0] + cost.together_s("B", samples)[0]
    return total
