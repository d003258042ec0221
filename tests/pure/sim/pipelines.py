"""Pipelines whose costs are known: orders with messages put in, and uniform costs of their stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from heterodyne.cost.routes import Route
from heterodyne.cost.stage import StageCosts
from heterodyne.cost.step import RankCosts, StepCosts
from heterodyne.plan import Action, Program
from heterodyne.plan.schedules import SCHEDULES, Orders
from heterodyne.plan.schedules.schedule import stage_places


def with_messages(orders: Orders, place_of: Sequence[int]) -> Program:
    """A chain: each stage reads what the one before it makes. One device a place, the rank is the number of the place."""
    ranks = []
    last = len(place_of) - 1
    for order in orders:
        actions: list[Action] = []
        for action in order:
            stage, index = action.stage, action.index
            before = stage > 0 and place_of[stage - 1] != place_of[stage]
            behind = stage < last and place_of[stage + 1] != place_of[stage]
            if action.kind == "F":
                actions += [Action(stage, "RECV_F", index)] * before + [action]
                actions += [Action(stage, "SEND_F", index)] * behind
            elif action.kind in ("B", "I"):
                actions += [Action(stage, "RECV_B", index)] * behind + [action]
                actions += [Action(stage, "SEND_B", index)] * before
            else:
                actions.append(action)
        ranks.append(tuple(actions))
    return Program(ranks=tuple(ranks))


def links(
    place_of: Sequence[int], micro_batches: int, seconds: float = 0.0, latency_s: float = 0.0, size: int = 1
) -> tuple[Route, ...]:
    """The routes of a chain, each pair of places joined by a link of its own in each direction."""
    made = []
    for stage, (a, b) in enumerate(pairwise(place_of)):
        if a != b:
            forth = Route(
                kind="F",
                source=(a, stage),
                destination=(b, stage + 1),
                link=f"{a} -> {b}",
                bytes=(size,) * micro_batches,
                latency_s=latency_s,
                seconds=(seconds,) * micro_batches,
            )
            back = replace(forth, kind="B", source=forth.destination, destination=forth.source, link=f"{b} -> {a}")
            made += [forth, back]
    return tuple(made)


def stage_costs(micro_batches: int, f: float, i: float, w: float, kept: int = 0, left: int = 0) -> StageCosts:
    return StageCosts(
        forward_s=(f,) * micro_batches,
        backward_s=(i + w,) * micro_batches,
        input_s=(i,) * micro_batches,
        weight_s=(w,) * micro_batches,
        kept_bytes=(kept,) * micro_batches,
        weight_bytes=(left,) * micro_batches,
    )


def uniform(
    schedule: str,
    places: int,
    chunks: int,
    micro_batches: int,
    *,
    f: float = 1.0,
    i: float = 1.0,
    w: float = 1.0,
    kept: int = 0,
    left: int = 0,
    seconds: float = 0.0,
    latency_s: float = 0.0,
) -> tuple[Program, StepCosts]:
    """A named schedule on alike places; ``f``, ``i``, ``w``: seconds of all stages of a place together, for one micro-batch."""
    made = SCHEDULES[schedule]
    place_of = stage_places(made.placement, places, chunks)
    orders = made.orders(places, chunks, micro_batches)
    stage = stage_costs(micro_batches, f / chunks, i / chunks, w / chunks, kept, left)
    ranks = tuple(
        RankCosts(stages={number: stage for number, own in enumerate(place_of) if own == place})
        for place in range(places)
    )
    return with_messages(orders, place_of), StepCosts(
        ranks=ranks, routes=links(place_of, micro_batches, seconds, latency_s)
    )
