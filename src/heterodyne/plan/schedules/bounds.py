"""What no orders can beat: how long a pipeline takes at least if its places only ever wait for what they must."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from heterodyne.plan.schedules.times import StageTimes

__all__ = ["place_lines"]


def place_lines(
    stages: Sequence[StageTimes], sends: Sequence[float], places: int, *, split: bool
) -> list[tuple[float, float]]:
    """For each place that can be the last one: seconds in which it cannot work, and seconds of work for one micro-batch.

    Stage i is on place i modulo ``places``. ``sends``: seconds of a message from each stage to the next one. ``split``: the halves of a
    backward may run apart.

    The first stage of a place waits for its first forward, and no other stage of the place runs before. The last whole backward of a
    place is of that stage too, and goes on through all before it. With halves, what a place does last may be the gradients of weights,
    for which no one waits; then the forwards before it and all its work count, or its work but those, and the inputs' gradients of
    the stages before it.
    """
    onward = [*sends, 0.0]
    if not split:
        own = [s.total_s for s in stages]
        return _lines([(sum(own[r::places]), own[r], onward[r]) for r in range(places)])
    inputs = [s.recompute_s + s.input_s for s in stages]
    whole = [sum(s.total_s for s in stages[r::places]) for r in range(places)]
    found, before, back = [], 0.0, stages[0].weight_s
    for place in range(places):
        found.append((before, whole[place]))
        if place:
            found.append(
                (
                    before + back,
                    sum(s.forward_s + i for s, i in zip(stages[place::places], inputs[place::places], strict=True)),
                )
            )
        before += stages[place].forward_s + onward[place]
        back += inputs[place] + onward[place]
    highest = _highest(found)
    return [line for line in found if line in highest]


def _highest(lines: Sequence[tuple[float, float]]) -> set[tuple[float, float]]:
    """Those that no other one is above everywhere: of all that begin no lower, each is the steepest."""
    found: set[tuple[float, float]] = set()
    steepest = -inf
    for line in sorted(set(lines), reverse=True):
        if line[1] > steepest:
            steepest = line[1]
            found.add(line)
    return found


def _lines(places: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """Return the lines of places with the seconds of a micro-batch, those of it in the first stage, and of a message.

    A place before one that is no faster waits less and works no more, so it is left out.
    """
    found: list[tuple[float, float]] = []
    around = 0.0
    for each, first, send_s in places:
        while found and found[-1][1] <= each:
            found.pop()
        found.append((around, each))
        around += first + 2 * send_s
    return found
