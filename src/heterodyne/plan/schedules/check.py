"""Whether orders can run and do all the work once, whoever wrote them. All faults are named, each with its place.

Orders are correct if every stage runs F of each micro-batch once and then either B, or I and after it W; if R, where there is one, is
between F and the backward; if everything stands on the place of its stage; if no places wait for each other in a circle; and if no place
holds more than it has room for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.held import held_along
from heterodyne.plan.schedules.schedule import Orders
from heterodyne.plan.schedules.times import Read, StageBytes, chain

__all__ = ["Fault", "order_faults"]

_KINDS = ("F", "B", "I", "W", "R")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What is wrong, and at which action of which place; ``position`` None for work that is not there."""

    message: str
    place: int
    position: int | None = None


def order_faults(
    orders: Orders,
    place_of_stage: Sequence[int],
    micro_batches: int,
    *,
    reads: Sequence[Read] | None = None,
    held_bytes: Sequence[StageBytes] | None = None,
    free_bytes: Sequence[int] | None = None,
    recomputes: Collection[int] | None = None,
) -> tuple[Fault, ...]:
    """Every rule that the orders break, with where; none if they can run.

    Args:
        reads: which stage reads from which (the seconds do not matter here); by default each from the one before it.
        held_bytes: by stage, what a micro-batch holds; ``free_bytes``: by place, the room for it. Without both, any amount fits.
        recomputes: the stages that do not keep everything, so that R has a meaning; None: any may.
    """
    places = 1 + max(place_of_stage, default=-1)
    if len(orders) != places:
        message = f"there are {len(orders)} orders for {places} places: give each place one, an empty one if it has nothing to do"
        return (Fault(message=message, place=min(len(orders), places)),)
    faults = list(_strangers(orders, place_of_stage, micro_batches, recomputes))
    if faults:
        return tuple(faults)  # the rest would only say the same again
    for stage, place in enumerate(place_of_stage):
        faults += _work_of(orders[place], place, stage, micro_batches)
    reads = chain(len(place_of_stage)) if reads is None else reads
    if not any(fault.position is None for fault in faults):
        faults += _deadlocks(orders, reads)
    if held_bytes is not None and free_bytes is not None:
        faults += _overflows(orders, held_bytes, free_bytes)
    return tuple(faults)


def _strangers(
    orders: Orders, place_of_stage: Sequence[int], micro_batches: int, recomputes: Collection[int] | None
) -> Iterator[Fault]:
    """Actions that have no business where they stand."""
    for place, row in enumerate(orders):
        for position, action in enumerate(row):
            message = None
            if action.kind not in _KINDS:
                message = "does not compute; orders hold F, B, I, W and R only: remove it"
            elif action.stage >= len(place_of_stage):
                message = f"is of stage {action.stage}, but there are {len(place_of_stage)} stages: remove it"
            elif place_of_stage[action.stage] != place:
                message = (
                    f"belongs on place {place_of_stage[action.stage]}, where stage {action.stage} is: move it there"
                )
            elif action.index is None or action.index >= micro_batches:
                message = f"is of a micro-batch that is not there: there are {micro_batches}, counted from 0: remove it"
            elif action.kind == "R" and recomputes is not None and action.stage not in recomputes:
                message = f"recomputes, but stage {action.stage} keeps everything: remove it"
            if message is not None:
                yield Fault(message=f"place {place}: {action} {message}", place=place, position=position)


def _work_of(row: Sequence[Action], place: int, stage: int, micro_batches: int) -> Iterator[Fault]:
    """Faults of one stage: each micro-batch's actions must be there once and in order."""
    at: list[dict[str, list[int]]] = [{} for _ in range(micro_batches)]
    for position, action in enumerate(row):
        if action.stage == stage and action.index is not None:
            at[action.index].setdefault(action.kind, []).append(position)
    for index, found in enumerate(at):
        where = f"place {place}: {stage}"
        for kind, positions in found.items():
            if len(positions) > 1:
                message = f"{where}{kind}{index} is there {len(positions)} times: run it once"
                yield Fault(message=message, place=place, position=positions[1])
        yield from _halves(found, where, place, index)
        yield from _sequence(found, where, place, index)


def _halves(found: dict[str, list[int]], where: str, place: int, index: int) -> Iterator[Fault]:
    """A micro-batch runs F, and either B or both I and W."""
    if "F" not in found:
        yield Fault(message=f"{where}F{index} is missing: every micro-batch runs forward once", place=place)
    if "B" in found:
        for kind in ("I", "W"):
            if kind in found:
                message = (
                    f"{where}{kind}{index} is there besides {where.split()[-1]}B{index}: run B, or I and W, not both"
                )
                yield Fault(message=message, place=place, position=found[kind][0])
    elif "I" not in found and "W" not in found:
        yield Fault(message=f"{where}B{index} is missing: run it, or its halves I and W", place=place)
    else:
        for kind, other in (("I", "W"), ("W", "I")):
            if kind not in found:
                message = f"{where}{kind}{index} is missing, though {where.split()[-1]}{other}{index} is there: run both halves"
                yield Fault(message=message, place=place)


def _sequence(found: dict[str, list[int]], where: str, place: int, index: int) -> Iterator[Fault]:
    """F before R before I or B before W."""
    stage = where.split()[-1]
    for earlier, later, why in (
        ("F", "B", "a backward needs its forward"),
        ("F", "I", "a backward needs its forward"),
        ("F", "R", "only what ran can be computed again"),
        ("R", "B", "the backward needs what is computed again"),
        ("R", "I", "the backward needs what is computed again"),
        ("I", "W", "W is the second half of the backward"),
    ):
        if earlier in found and later in found and found[later][0] < found[earlier][0]:
            message = f"{where}{later}{index} runs before {stage}{earlier}{index}: {why}, so put it behind"
            yield Fault(message=message, place=place, position=found[later][0])


def _deadlocks(orders: Orders, reads: Sequence[Read]) -> Iterator[Fault]:
    """Play without a clock until nothing moves; then follow who waits for whom until a place comes again."""
    done: set[tuple[str, int, int | None]] = set()
    at = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for place, row in enumerate(orders):
            while at[place] < len(row) and all(need in done for need in _needs(row[at[place]], reads)):
                done.add(_made(row[at[place]]))
                at[place] += 1
                moved = True
    stuck = [place for place, row in enumerate(orders) if at[place] < len(row)]
    if stuck:
        yield _cycle(orders, reads, at, stuck[0], done)


def _made(action: Action) -> tuple[str, int, int | None]:
    return ("I" if action.kind == "B" else action.kind, action.stage, action.index)


def _needs(action: Action, reads: Sequence[Read]) -> list[tuple[str, int, int | None]]:
    """Return what an action waits for on other places (or its own, where they read from themselves)."""
    if action.kind == "F":
        return [("F", read.source, action.index) for read in reads if read.reader == action.stage]
    if action.kind in ("B", "I"):
        return [
            ("I", read.reader, action.index)
            for read in reads
            if read.source == action.stage and read.backward_s is not None
        ]
    return []


def _cycle(
    orders: Orders, reads: Sequence[Read], at: Sequence[int], first: int, done: set[tuple[str, int, int | None]]
) -> Fault:
    makers = {_made(action): (place, n) for place, row in enumerate(orders) for n, action in enumerate(row)}
    path: list[int] = []
    links: list[str] = []
    place = first
    while place not in path:
        path.append(place)
        action = orders[place][at[place]]
        need = next(need for need in _needs(action, reads) if need not in done)
        other, position = makers[need]
        behind = orders[other][at[other]]
        wanted = orders[other][position]
        stands = "" if position == at[other] else f", which stands behind {behind}"
        links.append(f"{action} (place {place}) waits for {wanted} (place {other}){stands}")
        place = other
    begin = path.index(place)
    cycle = "; ".join(links[begin:])
    return Fault(
        message=f"places wait for each other forever: {cycle}: change the order on one of them",
        place=place,
        position=at[place],
    )


def _overflows(orders: Orders, held_bytes: Sequence[StageBytes], free_bytes: Sequence[int]) -> Iterator[Fault]:
    for place, row in enumerate(orders):
        along = held_along(row, held_bytes)
        over = [position for position, during in enumerate(along) if during > free_bytes[place]]
        if over:
            worst = max(over, key=along.__getitem__)
            yield Fault(
                message=f"place {place} holds {along[worst]} bytes of activations at {row[worst]}, {along[worst] - free_bytes[place]} "
                f"more than the {free_bytes[place]} that are free (too many first at {row[over[0]]}): run backwards earlier, "
                "recompute, or take smaller micro-batches",
                place=place,
                position=over[0],
            )
