"""What a forward keeps for its backward, counted; and gone when the forward's results are."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor

from heterodyne.measure.block_run import bytes_kept


def test_what_an_op_keeps_of_its_own_result_is_counted_once_and_let_go() -> None:
    weight = torch.ones(8, requires_grad=True)
    made: list[weakref.ref[Tensor]] = []

    def forward() -> None:
        result = weight.exp().sigmoid()  # both keep what they return
        made.append(weakref.ref(result))

    assert bytes_kept(forward, [weight]) == (2 * 8 * 4, 0)
    gc.collect()
    assert [ref() for ref in made] == [None]
