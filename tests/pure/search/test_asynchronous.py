"""Pipelines with predicted weights are searched for where they are asked for, and only there; memory counts what they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterodyne.errors import InfeasibleError
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.order import is_asynchronous
from heterodyne.search.planned import Planned
from heterodyne.search.planner import plan
from pure.build import cluster, graph, linear, profile

MODEL, DEVICES = graph(6), cluster(3)
KNOWN = profile(MODEL, DEVICES, [linear(1.0 / rate) for rate in (2, 1, 1)])


def planned(*, asynchronous: bool, batch: int = 12) -> Planned:
    able = Capabilities(MODEL, asynchronous=asynchronous)
    return plan(
        MODEL, DEVICES, KNOWN, global_batch_size=batch, micro_batch_sizes=(1, 2), strategy="pipeline", able=able
    )


def test_predicted_weights_are_proposed_where_they_are_asked_for_only() -> None:
    exact, inexact = (planned(asynchronous=asked) for asked in (False, True))
    assert not any(c.plan is not None and is_asynchronous(c.plan) for c in exact.candidates)
    assert all(c.plan is None or is_asynchronous(c.plan) for c in inexact.candidates)
    assert is_asynchronous(inexact.plan)


def test_a_step_that_is_not_flushed_takes_what_its_slowest_stage_does() -> None:
    found = planned(asynchronous=True)
    assert min(found.simulation.wait_s[rank] for rank in range(3) if found.simulation.busy_s[rank]) == pytest.approx(0)


def test_a_predicted_copy_of_the_weights_is_counted_on_all_stages_but_the_last() -> None:
    found = planned(asynchronous=True).plan
    flushed = found.model_copy(update={"schedule": "1F1B"})
    given = [
        plan(MODEL, DEVICES, KNOWN, global_batch_size=12, micro_batch_sizes=(1, 2), given=made).plan.predicted
        for made in (found, flushed)
    ]
    assert given[0] is not None
    assert given[1] is not None
    *ahead, last = (stage.devices[0] for stage in found.pipelines[0].stages)
    for stage, device in zip(found.pipelines[0].stages, ahead, strict=False):
        names = {name for op in MODEL.ops[slice(*stage.ops)] for name in op.parameters}
        held = sum(p.bytes for p in MODEL.parameters if p.name in names)
        assert given[0].memory_bytes[device] >= given[1].memory_bytes[device] + held
    assert given[0].memory_bytes[last] <= given[1].memory_bytes[last] * 1.001 + 1


def test_what_reads_one_weight_is_in_one_stage() -> None:
    """The middle of the model, where an even cut would be, reads one weight before and behind it."""
    middle = len(MODEL.ops) // 2
    (name,) = MODEL.ops[middle].parameters[:1]
    ops = list(MODEL.ops)
    for place in (middle - 1, middle + 1):
        ops[place] = replace(ops[place], parameters=(name, *ops[place].parameters[1:]))
    read = {parameter for op in ops for parameter in op.parameters}
    tied = replace(MODEL, ops=tuple(ops), parameters=tuple(p for p in MODEL.parameters if p.name in read))
    devices = cluster(2)
    found = plan(
        tied,
        devices,
        profile(tied, devices, [linear(1.0), linear(1.0)]),
        global_batch_size=12,
        micro_batch_sizes=(1, 2),
        strategy="pipeline",
        able=Capabilities(tied, asynchronous=True),
    ).plan
    assert is_asynchronous(found)
    (border,) = (stage.ops[0] for stage in found.pipelines[0].stages[1:])
    assert not middle - 1 < border <= middle + 1


def test_one_device_is_told_what_it_lacks() -> None:
    alone = cluster(1)
    able = Capabilities(MODEL, asynchronous=True)
    with pytest.raises(InfeasibleError, match="two devices and two micro-batches"):
        plan(MODEL, alone, profile(MODEL, alone, [linear(1.0)]), global_batch_size=4, able=able)
