"""The best orders that are found for given stages: named schedules, greedy ones, and what local improvement makes of them.

All are judged by the same clock, and only those that the memory has room for count. So the result is never slower than the best named
schedule that fits. It is better the more unlike the stages are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from heterodyne.errors import InfeasibleError
from heterodyne.plan.program import Action
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.gpipe import stage_by_stage
from heterodyne.plan.schedules.greedy import Policy, greedy_rows
from heterodyne.plan.schedules.held import peak_bytes
from heterodyne.plan.schedules.pipeline_work import PipelineWork
from heterodyne.plan.schedules.schedule import Orders
from heterodyne.plan.schedules.shifted_critical_path import recomputed_ahead
from heterodyne.plan.schedules.times import Read, StageBytes, StageTimes, chain

__all__ = ["BestOrders", "best_orders", "named_orders"]

_ACTIONS_PLAYED = 300_000  # by the local improvement: about a third of a second
_CLOSE = 1e-9
_UNLIMITED = 2**62


@dataclass(frozen=True, kw_only=True)
class BestOrders:
    """Orders, and what the clock says of them.

    Args:
        came_from: the named schedule or the policy that they began as.
        bound_s: no orders of these stages take less.
        tried: the makespan of every candidate before it was _improved.
    """

    orders: Orders
    came_from: str
    makespan_s: float
    bound_s: float
    peak_bytes: tuple[int, ...]
    tried: dict[str, float]


def best_orders(
    times: Sequence[StageTimes],
    places: Sequence[int],
    micro_batches: int,
    *,
    reads: Sequence[Read] | None = None,
    held: Sequence[StageBytes] | None = None,
    free_bytes: Sequence[int] | None = None,
    actions_played: int = _ACTIONS_PLAYED,
    joined: bool = False,
) -> BestOrders:
    """The shortest orders that are found, the same for the same arguments.

    Args:
        times: by stage. ``places``: the place of each stage, counted from 0.
        reads: which stage reads from which, and the seconds of the transfers; by default each from the one before it, at once.
        held: by stage, the bytes of a micro-batch; ``free_bytes``: by place, the room for them. Without them, any amount fits.
        actions_played: how much the local improvement may try.
        joined: no backward of the last stage begins before all its forwards are done.

    Raises InfeasibleError if some place has no room even for one micro-batch at a time.
    """
    count = 1 + max(places)
    work = PipelineWork(
        times=times,
        places=places,
        micro_batches=micro_batches,
        reads=chain(len(times)) if reads is None else reads,
        held=[StageBytes(activation=0)] * len(times) if held is None else held,
        free_bytes=[_UNLIMITED] * count if free_bytes is None else free_bytes,
        joined=joined,
    )
    bound = work.bound_s()
    candidates = _candidates(work, bound)
    ranked = sorted(candidates, key=lambda name: candidates[name][1])
    plays = actions_played // max(1, sum(map(len, candidates[ranked[0]][0])))
    best, (rows, makespan) = ranked[0], candidates[ranked[0]]
    for name in ranked[:3]:
        if makespan <= bound * (1 + _CLOSE):
            break
        better, shorter = _improved(work, candidates[name][0], plays=plays // 3, bound_s=bound)
        if shorter < makespan * (1 - _CLOSE):
            best, rows, makespan = name, better, shorter
    orders = work.clock.decode(_whole(work, rows, makespan))
    return BestOrders(
        orders=orders,
        came_from=best,
        makespan_s=makespan,
        bound_s=bound,
        peak_bytes=peak_bytes(orders, work.held),
        tried={name: seconds for name, (_, seconds) in candidates.items()},
    )


def named_orders(places: Sequence[int], micro_batches: int, recomputing: frozenset[int]) -> dict[str, Orders]:
    """The named schedules whose stages are on these places; with R ahead of every wait on the stages that recompute."""
    count = 1 + max(places)
    chunks, uneven = divmod(len(places), count)
    found = {}
    for schedule in SCHEDULES.values():
        if uneven or schedule.chunks not in (None, chunks) or schedule.stage_places(count, chunks) != tuple(places):
            continue
        if schedule.asynchronous:
            continue  # it trains with other weights, and its orders are those of another one
        orders = schedule.orders(count, chunks, micro_batches)
        plain = tuple(tuple(a for a in row if a.kind != "R" or a.stage in recomputing) for row in orders)
        found[schedule.name] = recomputed_ahead(plain, recomputing)
    return found


def _candidates(work: PipelineWork, bound_s: float) -> dict[str, tuple[Rows, float]]:
    """Everything that can run and fits, with its makespan, until something takes no longer than the bound."""
    recomputing = frozenset(s for s, t in enumerate(work.times) if t.recompute_s > 0 or work.held[s].again > 0)
    found: dict[str, tuple[Rows, float]] = {}
    for name, rows in _encoded(work, recomputing):
        makespan = work.clock.makespan(rows)
        if makespan < inf and all(work.fits(row, place) for place, row in enumerate(rows)):
            found[name] = (rows, makespan)
            if makespan <= bound_s * (1 + _CLOSE):
                break
    return found


def _encoded(work: PipelineWork, recomputing: frozenset[int]) -> Iterator[tuple[str, Rows]]:
    leanest = _stage_by_stage if work.joined else _one_at_a_time
    alone = work.clock.encode(leanest(work, recomputing))
    _require_room(work, alone)
    yield "layer by layer" if work.joined else "one at a time", alone
    for name, orders in named_orders(work.places, work.micro_batches, recomputing).items():
        yield name, work.clock.encode(orders)
    if len(work.places) > len(work.free_bytes) and not work.joined:
        yield "layer by layer", work.clock.encode(_stage_by_stage(work, recomputing))
    for policy in _policies(chunks=len(work.places) > len(work.free_bytes)):
        rows = greedy_rows(work, policy)
        if rows is not None:
            yield _name(policy), rows


def _policies(*, chunks: bool) -> Iterator[Policy]:
    orders = ((True, True), (True, False), (False, False)) if chunks else ((True, True),)
    for depth, in_turn, (forward, backward) in product((1.0, 1.4, 2.0, 3.0, inf), (True, False), orders):
        for split, patience in ((True, 0.0),) if chunks else ((True, 0.0), (True, 1.0), (False, 0.0)):
            yield Policy(
                depth=depth,
                in_turn=in_turn,
                split=split,
                patience=patience,
                forward_deep=forward,
                backward_deep=backward,
            )


def _name(policy: Policy) -> str:
    halves = "I W" if policy.split else "B"
    turn = "in turn" if policy.in_turn else "backward first"
    stages = f"{'late' if policy.forward_deep else 'early'} F, {'late' if policy.backward_deep else 'early'} B"
    return f"greedy (depth {policy.depth:g}, {halves}, {turn}, patience {policy.patience:g}, {stages})"


def _one_at_a_time(work: PipelineWork, recomputing: frozenset[int]) -> Orders:
    """Each micro-batch through all stages and back before the next one begins: what holds least."""
    rows: list[list[Action]] = [[] for _ in work.free_bytes]
    for index in range(work.micro_batches):
        for stage, place in enumerate(work.places):
            rows[place].append(Action(stage, "F", index))
        for stage in reversed(range(len(work.places))):
            rows[work.places[stage]].append(Action(stage, "B", index))
    return recomputed_ahead(tuple(map(tuple, rows)), recomputing)


def _stage_by_stage(work: PipelineWork, recomputing: frozenset[int]) -> Orders:
    """With several stages a place, and turns in the last one, the zebra order of HeterMoE (Wu et al., 2025)."""
    return recomputed_ahead(stage_by_stage(work.places, work.micro_batches, turn=not work.joined), recomputing)


def _require_room(work: PipelineWork, rows: Rows) -> None:
    peaks = peak_bytes(work.clock.decode(rows), work.held)
    lacking = {
        place: peak - free for place, (peak, free) in enumerate(zip(peaks, work.free_bytes, strict=True)) if peak > free
    }
    if lacking:
        raise InfeasibleError(
            "no order fits: "
            + "; ".join(f"place {place} lacks {lack} bytes for one micro-batch" for place, lack in lacking.items())
            + ": take smaller micro-batches, recompute more, or give these places less of the model",
            shortfalls={f"place {place}": lack for place, lack in lacking.items()},
        )


def _whole(work: PipelineWork, rows: Rows, makespan: float) -> Rows:
    """I and the W that follows it at once become B, on each place where nobody has to wait for it: two passes cost more than one."""
    for place, row in enumerate(rows):
        merged = _merged(work, row)
        tried = [merged if number == place else other for number, other in enumerate(rows)]
        if len(merged) < len(row) and work.clock.makespan(tried) <= makespan and work.fits(merged, place):
            rows = tried
    return rows


def _merged(work: PipelineWork, row: Sequence[int]) -> list[int]:
    from_halves = {1: 4, 5: 6}  # I: B, and I that recomputes: B that recomputes
    merged: list[int] = []
    skip = False
    for position, code in enumerate(row):
        kind, cell = divmod(code, work.clock.cells)
        following = row[position + 1] if position + 1 < len(row) else -1
        if skip:
            skip = False
        elif kind in from_halves and following == 2 * work.clock.cells + cell:
            merged.append(from_halves[kind] * work.clock.cells + cell)
            skip = True
        else:
            merged.append(code)
    return merged


# Local improvement: what stands on the critical path is moved, and what makes the whole shorter is kept.
#
# The critical path is the chain of actions, each starting when the one before it ends, that ends last. Between two places it goes over a
# transfer; on one place it is a block of actions without a wait. Only a change at the head or at the tail of such a block can
# make the whole shorter (Nowicki and Smutnicki, "A fast taboo search algorithm for the job shop problem", 1996), so an action of a
# block is moved before the block or behind it. Micro-batches keep going through each stage in order.
Rows = list[list[int]]


def _improved(work: PipelineWork, rows: Rows, *, plays: int, bound_s: float = 0.0) -> tuple[Rows, float]:
    """The best rows that are found from ``rows`` on with so many plays at most, and their makespan; never worse than ``rows``."""
    best = work.clock.makespan(rows)
    left = plays
    found = True
    while found and left > 0 and best > bound_s * (1 + _CLOSE):
        found = False
        for place, row in _moves(work, rows):
            if left <= 0:
                break
            tried = [row if number == place else other for number, other in enumerate(rows)]
            left -= 1
            makespan = work.clock.makespan(tried)
            if makespan < best * (1 - _CLOSE) and work.fits(row, place):
                rows, best, found = tried, makespan, True
                break
    return rows, best


def _moves(work: PipelineWork, rows: Rows) -> Iterator[tuple[int, list[int]]]:
    """A place and its changed row, for each legal move out of a block of the critical path, the nearest moves first."""
    for place, first, last in _blocks(work, rows):
        row = rows[place]
        for position in range(last - 1, first - 1, -1):
            stop = _reach(work, row, position, last, 1)
            if stop > position:
                yield place, [*row[:position], *row[position + 1 : stop + 1], row[position], *row[stop + 1 :]]
        for position in range(first + 1, last + 1):
            stop = _reach(work, row, position, first, -1)
            if stop < position:
                yield place, [*row[:stop], row[position], *row[stop:position], *row[position + 1 :]]


def _reach(work: PipelineWork, row: Sequence[int], position: int, goal: int, step: int) -> int:
    """Return how far towards ``goal`` an action may move without passing its own micro-batch, or the same work of its stage."""
    clock = work.clock
    code = row[position]
    cell, slot = code % clock.cells, clock.slot[code]
    stage, kind = cell // clock.micro_batches, slot // clock.cells
    at = position
    while at != goal:
        other = row[at + step]
        its_cell = other % clock.cells
        if its_cell == cell:
            break
        if its_cell // clock.micro_batches == stage and clock.slot[other] // clock.cells == kind:
            break
        at += step
    return at


def _blocks(work: PipelineWork, rows: Rows) -> list[tuple[int, int, int]]:
    """(place, first, last) of the runs of two and more actions of the critical path, from its end to its beginning."""
    clock = work.clock
    starts, ends = clock.run(rows)
    made_at = {clock.slot[code]: (place, n) for place, row in enumerate(rows) for n, code in enumerate(row)}
    place = max(range(len(rows)), key=lambda p: ends[p][-1] if ends[p] else 0.0)
    position = last = len(rows[place]) - 1
    blocks = []
    while position >= 0:
        start = starts[place][position]
        before = None
        for slot, lag in clock.sources(rows[place][position]):
            other, its = made_at[slot]
            if other != place and ends[other][its] + lag >= start:
                before = (other, its)
        if before is None and position > 0 and ends[place][position - 1] >= start:
            position -= 1
            continue
        if last > position:
            blocks.append((place, position, last))
        if before is None:
            break
        place, position = before
        last = position
    return blocks
