"""What a search of a large fleet keeps are gigabytes, which nobody holds once the search is dropped."""

from __future__ import annotations

import gc
import random
import weakref

from pure.search.fleet.small import drawn, search_of


def test_a_search_that_is_dropped_is_freed_at_once() -> None:
    fleet, costs, samples = drawn(random.Random(7), devices=5, blocks=4)
    search = search_of(fleet, costs, samples)
    assert search.run() is not None
    kept = [weakref.ref(search), weakref.ref(search.predictor), weakref.ref(search.tables)]
    gc.disable()
    try:
        del search
        assert [held() for held in kept] == [None] * len(kept)
    finally:
        gc.enable()
