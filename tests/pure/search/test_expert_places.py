"""Attention and experts on places of their own: proposed where that is faster, in an order without waits, and refused in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from heterodyne.cluster.profile import Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.errors import InfeasibleError
from heterodyne.graph import Block, Loss, ModelGraph, Ref
from heterodyne.plan.check import violations
from heterodyne.search.explain import alternatives
from heterodyne.search.planned import Candidate, Planned
from heterodyne.search.planner import plan
from pure.build import cluster, device_profile, graph, linear

BARE = MemoryAssumptions(context_bytes={"cpu": 0}, fragmentation=0.0, block_bytes=0)
LAYERS, EXPERTS, SECONDS = 4, 8, 1.0


def mixtures(width: int = 8) -> ModelGraph:
    """Of each layer the second op is a mixture, whose experts have most of the weights."""
    plain = graph(LAYERS, width=width)
    ops = tuple(
        replace(op, target="heterodyne.experts.default") if op.name.endswith("down") else op for op in plain.ops
    )
    parameters = tuple(
        replace(p, shape=(EXPERTS, *p.shape)) if p.name.endswith("down.weight") else p for p in plain.parameters
    )
    blocks = [
        Block(index=n, name=op.name, kind=op.name.split(".")[-1], start=n, stop=n + 1) for n, op in enumerate(ops)
    ]
    return replace(plain, ops=ops, parameters=parameters, blocks=tuple(blocks))


def planned(
    machines: Cluster,
    seconds: Sequence[tuple[float, float]],
    *,
    model: ModelGraph | None = None,
    samples: int = 16,
    strategy: str = "auto",
) -> Planned:
    """``seconds``: of a sample on each device, in all that is no mixture, and in the mixtures."""
    model = model or mixtures()
    devices = {}
    for device, (rest, experts) in zip(machines.devices, seconds, strict=True):
        one = device_profile(model, linear(len(model.blocks) * SECONDS), sizes=(1, 2, 4))
        scale = {kind: (experts if kind == "down" else rest) / LAYERS for kind in model.kinds}
        scale |= dict.fromkeys({"embed", "head"} & set(scale), 1e-3)
        blocks = {
            kind: tuple(
                replace(s, forward_s=s.forward_s * scale[kind], backward_s=s.backward_s * scale[kind]) for s in own
            )
            for kind, own in one.blocks.items()
        }
        devices[device.id] = replace(one, blocks=blocks)
    return plan(
        model,
        machines,
        Profile(key="test", devices=devices),
        global_batch_size=samples,
        micro_batch_sizes=(1, 2),
        strategy=strategy,  # type: ignore[arg-type]  # one of them
        memory=BARE,
    )


def apart(found: Planned) -> list[Candidate]:
    return [c for c in found.candidates if c.name.startswith("attention ")]


def test_devices_do_what_they_are_good_at() -> None:
    """The first device is as good at experts as the other one, and ten times as good at all else."""
    machines = cluster(2)
    found = planned(machines, [(1.0, 2.0), (10.0, 2.0)])
    (chosen,) = (c for c in apart(found) if c is found.chosen)
    assert chosen.plan is not None
    (pipeline,) = chosen.plan.pipelines
    assert pipeline.places == tuple((device.id,) for device in machines.devices)
    assert violations(chosen.plan, found.graph, machines) == ()
    of_experts = [stage.ops for stage in pipeline.stages if stage.devices == pipeline.places[1]]
    assert [found.graph.ops[start].kind for start, _ in of_experts] == ["experts"] * len(of_experts)
    work = sum((stop - start) * 2.0 / LAYERS for start, stop in of_experts)
    assert chosen.step_s == pytest.approx(16 * max(work, 3.0 - work), rel=0.1), "no place waits but at its ends"


def test_experts_of_some_layers_stay_where_both_places_then_have_as_much_to_do() -> None:
    found = planned(cluster(2), [(1.0, 3.0), (20.0, 3.0)])
    (candidate,) = (c for c in apart(found) if c.plan is not None)
    assert "those of 1 layer with the attention" in candidate.name, "1 + 3/4 and 9/4 are nearer than 1 and 3"


def test_alike_devices_gain_nothing_and_this_is_told() -> None:
    found = planned(cluster(2), [(1.0, 1.0), (1.0, 1.0)])
    assert not found.chosen.name.startswith("attention ")
    (row,) = (row for row in alternatives(found) if row.name == "the model cut into stages or parts")
    assert "takes at least" in row.note


def test_a_loss_of_all_samples_turns_back_when_all_are_there() -> None:
    model = mixtures()
    head = len(model.ops) - 1
    joined = replace(model, loss=Loss(reduction="coupled"), output=Ref(model.ops[-1].name), together_from=head)
    found = planned(cluster(2), [(1.0, 2.0), (10.0, 2.0)], model=joined)
    (candidate,) = (c for c in apart(found) if c.plan is not None)
    assert candidate.plan is not None
    assert violations(candidate.plan, joined, found.cluster) == ()
    assert candidate.step_s == pytest.approx(16 * 1.5, rel=0.1), "the experts of one layer stay"


def test_a_place_without_memory_for_its_experts_is_told_once() -> None:
    model = mixtures(width=256)
    one = 4 * 4 * 256 * 256  # an expert with its gradient and AdamW's state
    (lacking,) = apart(planned(cluster(2, memory=[100 * one, one // 2]), [(1.0, 2.0), (10.0, 2.0)], model=model))
    assert lacking.plan is None
    assert "one of them 1 MiB" in lacking.why_not
    assert "room for 512 KiB on n0/cpu:1 to 100 MiB on n0/cpu:0" in lacking.why_not
    with pytest.raises(InfeasibleError):
        planned(cluster(2, memory=one // 2), [(1.0, 2.0), (10.0, 2.0)], model=model, strategy="pipeline")
