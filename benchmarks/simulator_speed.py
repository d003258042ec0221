"""How many actions a second the simulator plays on one core, from program and costs to the result.

Eight places with two stages each, interleaved, 64 micro-batches, two steps: the size of a plan that a search tries by the hundred. The
bar is on the plan whose links are its own, where every order is known beforehand. Two more rows show what it costs to play event by
event: links that several ranks share, and collectives that slow the computing of their ranks.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from time import process_time

from results import Results, arguments, spread

from heterodyne.cost.routes import Route
from heterodyne.cost.stage import StageCosts
from heterodyne.cost.step import RankCosts, StepCosts
from heterodyne.plan import Action, Program
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.sim import simulate

PLACES, CHUNKS, MICRO_BATCHES, STEPS = 8, 2, 64, 2


def main() -> int:
    options = arguments(__doc__)
    results = Results("simulator_speed")
    program, costs = interleaved()
    repeats = 20 if options.quick else 100
    rates = {}
    for what, played in (
        ("own links", costs),
        ("shared links", on_shared_links(costs)),
        ("collectives that slow", with_collectives(costs)),
    ):
        made = with_reductions(program) if what.startswith("collectives") else program
        actions = STEPS * sum(map(len, made.ranks))
        rates[what] = [actions / seconds(made, played) for _ in range(repeats)]
        results.row(what, actions=actions, actions_per_s=spread(rates[what]))
    results.bar("actions a second", spread(rates["own links"])["median"], ">= 500000")
    return results.write(options.json)


def seconds(program: Program, costs: StepCosts) -> float:
    """Of one core: other processes of this machine do not count."""
    start = process_time()
    played = simulate(program, costs, steps=STEPS)
    assert played.step_s >= costs.lower_bound_s
    return process_time() - start


def interleaved() -> tuple[Program, StepCosts]:
    """Unequal stages of a chain, each a little longer than the one before, and messages between them."""
    schedule = SCHEDULES["Interleaved1F1B"]
    place_of = schedule.stage_places(PLACES, CHUNKS)
    orders = schedule.orders(PLACES, CHUNKS, MICRO_BATCHES)
    ranks: list[tuple[Action, ...]] = []
    for order in orders:
        actions: list[Action] = []
        for action in order:
            stage, index = action.stage, action.index
            first, last = stage == 0, stage == len(place_of) - 1
            if action.kind == "F":
                actions += [] if first else [Action(stage, "RECV_F", index)]
                actions += [action] if last else [action, Action(stage, "SEND_F", index)]
            else:
                actions += [] if last else [Action(stage, "RECV_B", index)]
                actions += [action] if first else [action, Action(stage, "SEND_B", index)]
        ranks.append((*actions, Action(0, "STEP")))
    return Program(ranks=tuple(ranks)), StepCosts(ranks=tuple(map(rank_costs, range(PLACES))), routes=chain(place_of))


def rank_costs(place: int) -> RankCosts:
    stages = {}
    for number in range(place, PLACES * CHUNKS, PLACES):
        forward = 1e-3 * (1 + 0.01 * number)
        stages[number] = StageCosts(
            forward_s=(forward,) * MICRO_BATCHES,
            backward_s=(2 * forward,) * MICRO_BATCHES,
            kept_bytes=(2**20,) * MICRO_BATCHES,
        )
    return RankCosts(stages=stages, step_s=1e-2, overhead_s=1e-3, fixed_bytes=2**30)


def chain(place_of: tuple[int, ...]) -> tuple[Route, ...]:
    """A link for each pair of places and each direction: 0.1 ms on the wire, 20 us of latency."""
    routes = []
    for stage, (a, b) in enumerate(pairwise(place_of)):
        forth = Route(
            kind="F",
            source=(a, stage),
            destination=(b, stage + 1),
            link=f"{a} -> {b}",
            bytes=(2**20,) * MICRO_BATCHES,
            latency_s=2e-5,
            seconds=(1e-4,) * MICRO_BATCHES,
        )
        back = replace(forth, kind="B", source=forth.destination, destination=forth.source, link=f"{b} -> {a}")
        routes += [forth, back]
    return tuple(routes)


def on_shared_links(costs: StepCosts) -> StepCosts:
    """All messages of one direction over one wire."""
    return replace(costs, routes=tuple(replace(route, link=f"all {route.kind}") for route in costs.routes))


def with_collectives(costs: StepCosts) -> StepCosts:
    """One reduction over all ranks at the end of the step, which takes half of the speed of those that compute."""
    ranks = tuple(
        None if own is None else replace(own, ready={0: ((place, 0.5),)}, overlap=0.5)
        for place, own in enumerate(costs.ranks)
    )
    return replace(costs, ranks=ranks, reduce_s=(1e-2,))


def with_reductions(program: Program) -> Program:
    reduce = Action(0, "REDUCE_GRAD", 0)
    return Program(ranks=tuple((*actions[:-1], reduce, actions[-1]) for actions in program.ranks))


if __name__ == "__main__":
    sys.exit(main())
