"""The same pipeline ranks with another number of virtual stages: each rank keeps its number of layers, cut as evenly as possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from heterodyne.search.fleet.plan import Template

__all__ = ["chunked"]


def chunked(template: Template, chunks: int) -> Iterator[Template]:
    """The template with ``chunks`` virtual stages on each rank, the longer ones first and then last; nothing where there are too few layers
    or ranks.

    Every virtual stage has at least one layer: a rank with fewer layers than virtual stages takes some from the rank with most.
    """
    places = template.places
    layers = template.stages[-1].stop
    if chunks > 1 and (places < 2 or places * chunks > layers):
        return
    counts = [sum(stage.stop - stage.start for stage in template.stages[place::places]) for place in range(places)]
    found: dict[Template, None] = {}
    for longer_first in (True, False):
        sizes = [0] * (places * chunks)
        for place, count in enumerate(counts):
            each, rest = divmod(count, chunks)
            for chunk in range(chunks):
                longer = chunk < rest if longer_first else chunk >= chunks - rest
                sizes[chunk * places + place] = max(1, each + longer)
        while sum(sizes) > layers:
            most = max(range(len(sizes)), key=sizes.__getitem__)
            sizes[most] -= 1
        found[_of_sizes(template, chunks, sizes)] = None
    yield from found


def _of_sizes(template: Template, chunks: int, sizes: Sequence[int]) -> Template:
    stops = list(accumulate(sizes))
    stages = tuple(
        replace(template.homes[number % template.places], start=stop - size, stop=stop)
        for number, (size, stop) in enumerate(zip(sizes, stops, strict=True))
    )
    return replace(template, stages=stages, chunks=chunks)
