"""Why this plan: the words follow from the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.search.explain import alternatives, paragraph, ratio_in_words, shares
from heterodyne.search.planned import Planned
from heterodyne.search.planner import plan
from pure.build import cluster, graph, linear, profile

MODEL = graph(4)


def planned(**options: object) -> Planned:
    machines = cluster(4, memory=[2**30, 2**30, 2**30, 2**20])
    curves = [linear(0.01 / s) for s in (0.7, 0.35, 0.2, 1.0)]
    return plan(MODEL, machines, profile(MODEL, machines, curves), global_batch_size=50, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "words"), [(1.0, "just as long"), (1.034, "3.4% longer"), (1.9, "1.90x as long"), (0.97, "3.0% shorter")]
)
def test_ratios(ratio: float, words: str) -> None:
    assert ratio_in_words(ratio) == words


@given(st.floats(0.1, 50))
def test_a_longer_step_is_never_called_shorter(ratio: float) -> None:
    words = ratio_in_words(ratio)
    assert ratio < 1 or "shorter" not in words
    assert ratio > 1 or ("longer" not in words and "x as long" not in words)
    assert 0.999 < ratio < 1.001 or words != "just as long"


def test_the_reason_compares_with_each_kind_of_alternative() -> None:
    reason = planned().plan.reason
    assert reason.startswith("balanced over the 3 devices that fit: fastest of ")
    for words in (
        "equal shares would take",
        "without n0/cpu:2 would take",
        "the fastest device alone, n0/cpu:0 would take",
    ):
        assert words in reason


def test_what_was_asked_for_is_the_reason() -> None:
    reason = planned(strategy="equal").plan.reason
    assert reason.startswith(
        "equal shares: equal shares were asked for; balanced over the 3 devices that fit would take"
    )
    assert "shorter" in reason


def test_rows_of_alternatives_are_sorted_and_relative_to_the_chosen_one() -> None:
    rows = alternatives(planned())
    assert rows[0].chosen
    steps = [row.step_s for row in rows if row.step_s is not None]
    assert steps == sorted(steps)
    assert sum(row.chosen for row in rows) == 1


def test_rows_of_shares_hold_every_device_and_the_whole_batch() -> None:
    rows = shares(planned())
    assert [row.device for row in rows] == [f"n0/cpu:{i}" for i in range(4)]
    assert sum(row.samples for row in rows) == 50
    assert rows[3].micro_batches == "idle"
    assert all(row.headroom_bytes == 2**30 - row.memory_bytes for row in rows[:3])


@pytest.mark.tour("law 5")
def test_the_paragraph_tells_shares_step_memory_reason_and_who_is_idle() -> None:
    made = planned()
    text = paragraph(made)
    assert "50 samples a step over 3 of 4 devices" in text
    for row in shares(made)[:3]:
        assert f"{row.device} {row.samples} ({row.micro_batches})" in text
    assert "Memory is tightest on n0/cpu:" in text
    assert f"Why: {made.plan.reason}." in text
    assert "Idle: n0/cpu:3 has 1 MiB and needs" in text


def test_what_the_sum_of_blocks_leaves_out_is_kept() -> None:
    machines = cluster(1)
    measured = profile(MODEL, machines, [linear(1.0)])
    (device,) = measured.devices.values()
    whole = tuple(
        replace(s, forward_s=0.8 * s.micro_batch_size / 3, backward_s=1.6 * s.micro_batch_size / 3)
        for s in device.blocks["head"]
    )
    faster = replace(measured, devices={"n0/cpu:0": replace(device, blocks={**device.blocks, "*": whole})})
    assert plan(MODEL, machines, faster, global_batch_size=4).simulation.step_s == pytest.approx(0.8 * 4)


def test_one_device_has_no_alternative() -> None:
    machines = cluster(1)
    only = plan(MODEL, machines, profile(MODEL, machines, [linear(1.0)]), global_batch_size=4)
    assert only.plan.reason == "only one device, so only one plan"
    assert len(alternatives(only)) == 1
