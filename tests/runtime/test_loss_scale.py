"""The scale of a loss in fp16, as torch's GradScaler moves it."""

from __future__ import annotations

import torch

from heterodyne.runtime.weights.loss_scale import LossScale


def test_it_doubles_after_2000_good_steps_and_halves_at_an_overflow() -> None:
    scale = LossScale()
    assert scale.value == 2.0**15
    for _ in range(1999):
        scale.update(overflow=False)
    assert scale.value == 2.0**15
    scale.update(overflow=False)
    assert (scale.value, scale.good) == (2.0**16, 0)
    scale.update(overflow=False)
    scale.update(overflow=True)
    assert (scale.value, scale.good) == (2.0**15, 0)


def test_it_stays_between_1_and_2_to_the_24() -> None:
    scale = LossScale()
    for _ in range(3000):
        scale.update(overflow=True)
    assert scale.value == 1.0
    for _ in range(30 * 2000):
        scale.update(overflow=False)
    assert scale.value == 2.0**24


def test_a_run_that_goes_on_counts_on() -> None:
    before = LossScale(value=8.0, good=1999)
    after = LossScale()
    after.load_state_dict(before.state_dict())
    after.update(overflow=False)
    assert after.value == 16.0


def test_what_is_in_range_loses_no_bit() -> None:
    gradient = torch.randn(64)
    scaled = gradient * LossScale().value
    LossScale().unscale([scaled])
    assert torch.equal(scaled, gradient)
