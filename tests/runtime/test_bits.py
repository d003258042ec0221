"""Every change of a tensor's values is seen, wherever it lies in its memory."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.runtime.weights.bits import sums_of_bits


@given(
    first=st.integers(0, 9),
    size=st.integers(1, 40),
    at=st.integers(0, 39),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_a_change_of_one_element_is_seen(first: int, size: int, at: int, dtype: torch.dtype) -> None:
    memory = torch.randn(60, dtype=dtype)
    tensor = memory[first : first + size]
    before = sums_of_bits([tensor, memory])
    assert sums_of_bits([tensor, memory]) == before
    tensor[at % size] *= 0.9
    after = sums_of_bits([tensor, memory])
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_none_and_empty_ones() -> None:
    assert sums_of_bits([]) == []
    assert sums_of_bits([torch.empty(0, 3), torch.zeros(2).t()]) == [0, 0]
