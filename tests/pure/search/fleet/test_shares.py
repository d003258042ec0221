"""When unlike pipelines have done a batch together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heterodyne.search.fleet.shares import time_until

LINE = st.tuples(st.floats(0, 20), st.floats(0.1, 3))
PIPELINES = st.tuples(st.lists(LINE, min_size=1, max_size=4), st.integers(1, 24), st.integers(1, 40))


@given(kinds=st.lists(PIPELINES, min_size=2, max_size=4), samples=st.integers(1, 300))
def test_it_is_the_first_end_of_a_micro_batch_at_which_all_samples_are_done(
    kinds: list[tuple[list[tuple[float, float]], int, int]], samples: int
) -> None:
    samples = min(samples, sum(size * most for _, size, most in kinds))
    ends = sorted(
        (max(around + count * each for around, each in lines), size)
        for lines, size, most in kinds
        for count in range(1, most + 1)
    )
    done, expected = 0, 0.0
    for end, size in ends:
        if done < samples:
            done, expected = done + size, end
    found = time_until([(lines, size) for lines, size, _ in kinds], [most for _, _, most in kinds], samples)
    assert expected * (1 - 1e-9) <= found <= expected
