"""What a fleet lacks is a sum, and so is what would help."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heterodyne.search.shortfall import shortfall

GIB = 2**30


def test_it_tells_by_how_much_and_what_would_do() -> None:
    told = shortfall({"big": (1, 8 * GIB), "small": (2, 2 * GIB)}, on_devices=27 * GIB, on_hosts=GIB)
    assert "room for 12 GiB, 15 GiB too little: 2 more of big would hold that" in told
    assert "(1 GiB) on hosts" in told


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 2**40)), min_size=1, max_size=3), st.integers(1, 2**50))
def test_so_many_more_are_enough_and_one_fewer_are_not(rooms: list[tuple[int, int]], needs: int) -> None:
    named = {f"k{number}": room for number, room in enumerate(rooms)}
    told = shortfall(named, on_devices=needs, on_hosts=0)
    there, best = sum(count * room for count, room in rooms), max(room for _, room in rooms)
    if " more of " not in told:
        assert needs <= there
        return
    more = int(told.split(": ")[-1].split(" more of ")[0].replace(",", ""))
    assert there + more * best >= needs > there + (more - 1) * best
