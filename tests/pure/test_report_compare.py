"""Predicted against measured, with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from heterodyne.cluster import Cluster, Device
from heterodyne.plan import Plan, Prediction
from heterodyne.report.compare import Claim, compare
from heterodyne.report.run import Metrics, Run, StepMetrics
from heterodyne.timeline import Event, Timeline


def timeline(origin: str, forward_s: float, reduce_s: float) -> Timeline:
    events = [
        Event(rank=0, lane="compute", kind="F", name="0F0", step=0, start_s=0.0, end_s=forward_s),
        Event(
            rank=0,
            lane="comm",
            kind="REDUCE_GRAD",
            name="0REDUCE_GRAD0",
            step=0,
            start_s=forward_s,
            end_s=forward_s + reduce_s,
        ),
    ]
    return Timeline.of("measured" if origin == "measured" else "simulated", ["n/a"], events)


def a_run() -> Run:
    steps = tuple(
        StepMetrics(step=i, step_s=s, samples_per_s=8 / s, efficiency=0.8) for i, s in enumerate([4.0, 2.0, 2.5])
    )
    return Run(
        directory=Path("run"),
        cluster=Cluster(name="one", devices=(Device(id="n/a", kind="cpu", node="n", memory_bytes=1000),)),
        plan=Plan(
            model="m",
            cluster="c",
            global_batch_size=8,
            pipelines=(),
            idle=("n/a",),
            predicted=Prediction(step_s=2.0, samples_per_s=4.0, efficiency=1.0, memory_bytes={"n/a": 600}),
        ),
        metrics=Metrics(steps=steps),
        measured=timeline("measured", 2.0, 0.5),
        simulated=timeline("simulated", 1.5, 0.6),
        summary={"peak_memory_bytes": {"n/a": 800}},
    )


@pytest.mark.tour("law 3")
def test_errors_are_relative_to_the_measured_value_and_signed() -> None:
    comparison = compare(a_run())
    step, rate, efficiency = comparison.run
    assert replace(efficiency, measured=30.0).error is None, (
        "more than all devices reach says that measuring was unsteady"
    )
    assert comparison.step is step
    assert (step.predicted, step.measured) == (2.0, 2.5)  # the median of 4, 2 and 2.5
    assert step.error == pytest.approx(-0.2)
    assert rate.error == pytest.approx(4.0 / 3.2 - 1)
    assert efficiency.error == pytest.approx(0.25)
    assert [(c.device, c.error) for c in comparison.memory] == [("n/a", pytest.approx(-0.25))]


def test_each_kind_of_each_rank_is_compared() -> None:
    comparison = compare(a_run())
    assert comparison.kinds == ("F", "REDUCE_GRAD", "wait")
    assert {c.what: c.error for c in comparison.of_rank(0)} == pytest.approx(
        {"F": -0.25, "REDUCE_GRAD": 0.2, "wait": 0.2}
    )
    assert comparison.of_rank(1) == ()


def test_what_is_not_known_has_no_error() -> None:
    comparison = compare(Run(directory=Path("run")))
    assert all(claim.error is None for claim in comparison.run)
    assert comparison.seconds == comparison.memory == ()
    assert Claim(what="wait", predicted=0.1, measured=0.0, unit="s").error is None


def test_without_metrics_and_plan_the_timelines_speak() -> None:
    step = compare(
        Run(directory=Path("run"), measured=timeline("measured", 2.0, 0.5), simulated=timeline("simulated", 1.5, 0.6))
    ).step
    assert (step.predicted, step.measured) == (pytest.approx(2.1), pytest.approx(2.5))
