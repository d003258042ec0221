"""A small model for each trait of the table of what runs, and a small plan for each feature in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from heterodyne.graph import Loss, ModelGraph, ModuleOnly, Ref
from heterodyne.plan import Axis, Layout, MicroBatches, Pipeline, Plan, Region, Stage
from heterodyne.plan.capabilities import Capabilities, Feature
from pure.build import cluster, graph

__all__ = ["ABLE", "CHAIN", "DEVICES", "PLANS", "plan_with"]

CHAIN = graph(2)
ABLE: Mapping[str, Capabilities] = {
    "any model": Capabilities(CHAIN),
    "statistics over the batch (BatchNorm)": Capabilities(graph(2, places=(2,), batch_statistics=True)),
    "a loss that compares samples": Capabilities(
        replace(CHAIN, loss=Loss(reduction="coupled"), output=Ref(CHAIN.ops[-1].name))
    ),
    "a model that only its module trains": Capabilities(
        replace(CHAIN, module_only=(ModuleOnly(what="a hook", source="net.py:3"),))
    ),
    "a model whose graph a check has refused": Capabilities(CHAIN, module_only="its graph cut in two is another"),
    "a model without a graph": Capabilities(replace(CHAIN, opaque="data decides the flow (net.py:7)")),
    "an optimizer of whole weights": Capabilities(CHAIN, "weight"),
    "predicted weights": Capabilities(CHAIN, asynchronous=True),
    "an optimizer of the whole model": Capabilities(CHAIN, "model"),
}
"""Of each trait by its name."""

DEVICES = cluster(4)
_IDS = tuple(device.id for device in DEVICES.devices)
_SPLIT, _CONTEXT = (Layout(kind=kind, shares=(1, 1)) for kind in ("split", "context"))


def _line(*stages: dict[str, Any], sizes: Sequence[int] = (2,), order: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"stages": stages, "sizes": tuple(sizes), "order": order}


_FORWARDS_FIRST = ("0F0 0F1 0B0 0B1",)
_TWO: tuple[dict[str, Any], ...] = (_line({}), _line({}))
PLANS: Mapping[Feature, tuple[int, tuple[dict[str, Any], ...]]] = {
    "several_stages": (0, (_line({}, {}),)),
    "tensor_parallel": (0, (_line({"layout": _SPLIT}),)),
    "context_parallel": (0, (_line({"layout": _CONTEXT}),)),
    "rows_of_parts": (
        0,
        (_line({"layout": Layout(shares=(1, 1), inner=(Axis(kind="split", shares=(1, 1)),))}),),
    ),
    "cuts_along_two_axes": (
        0,
        (_line({"layout": Layout(kind="context", shares=(1, 1), inner=(Axis(kind="split", shares=(1, 1)),))}),),
    ),
    "recompute": (0, (_line({"recompute": (1,)}),)),
    "selective_recompute": (0, (_line({"recompute": (2,), "keep": ("up.linear",)}),)),
    "activation_offload": (0, (_line({"offload_activations": (1,)}),)),
    "split_backward": (0, (_line({}, order=("0F0 0I0 0W0",)),)),
    "several_micro_batches": (0, (_line({}, sizes=(2, 2), order=_FORWARDS_FIRST),)),
    "early_backward": (0, (_line({}, sizes=(2, 2)),)),
    "unequal_counts": (0, (_line({}, sizes=(2, 2), order=_FORWARDS_FIRST), _line({}))),
    "unlike_pipelines": (0, (_line({"recompute": (1,)}), _line({}))),
    "empty_share": (0, (_line({"layout": Layout(shares=(1, 0))}),)),
    "overlap": (0, (_line({"layout": _SPLIT, "overlap": True}),)),
    "overlap_with_recompute": (0, (_line({"layout": _SPLIT, "overlap": True, "recompute": (1,)}),)),
    "state_sharding": (1, _TWO),
    "gradient_sharding": (2, _TWO),
    "parameter_sharding": (3, (_line({"layout": Layout(shares=(1, 1))}),)),
    "parameter_sharding_over_pipelines": (3, _TWO),
    "offload": (0, (_line({"offload": True}),)),
    "asynchronous": (0, (_line({}, {}, sizes=(2, 2)),)),
}
"""For each feature the ZeRO level and the pipelines of a plan that uses it; stages cut the model at its middle, if there are two."""


def plan_with(feature: Feature, model: ModelGraph) -> Plan:
    """Return the plan of that feature for a model, on `DEVICES`."""
    zero, lines = PLANS[feature]
    free, pipelines = list(_IDS), []
    for line in lines:
        borders = [round(len(model.ops) * n / len(line["stages"])) for n in range(len(line["stages"]) + 1)]
        stages = []
        for asked, start, stop in zip(line["stages"], borders, borders[1:], strict=False):
            rest = {"layout": Layout(shares=(1,)), **asked}
            layout = rest.pop("layout")
            count = len(layout.of_devices) if not layout.inner else 4
            devices, free = tuple(free[:count]), free[count:]
            stages.append(Stage(ops=(start, stop), devices=devices, regions=(Region(layout=layout),), **rest))
        pipelines.append(Pipeline(micro_batches=MicroBatches(line["sizes"]), stages=tuple(stages), order=line["order"]))
    return Plan(
        model=model.fingerprint,
        cluster=DEVICES.fingerprint,
        global_batch_size=sum(pipeline.micro_batches.samples for pipeline in pipelines),
        zero=zero,
        schedule="Async1F1B" if feature == "asynchronous" else "1F1B",
        pipelines=tuple(pipelines),
        idle=tuple(free),
    )
