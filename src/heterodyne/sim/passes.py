"""The passes of a rank: what each of them takes, and where in it gradients become complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from heterodyne.cost.step import RankCosts
from heterodyne.plan.program import Action

__all__ = ["Table", "completes", "cuts_of", "exchange_s", "seconds_of"]

Table: TypeAlias = dict[str, dict[int, tuple[float, ...]]]
"""Seconds by kind, stage and micro-batch."""


def seconds_of(actions: Sequence[Action], costs: RankCosts) -> Table:
    """Seconds of the passes by kind, stage and micro-batch. What is recomputed counts in B or I where the list has no R for it; what is
    waited for from the host where it has no RELOAD."""
    table: Table = {kind: {} for kind in ("F", "B", "I", "W", "R")}
    halved = {action.stage for action in actions if action.kind == "W"}
    redone: set[tuple[int, int | None]] | None = None
    for number, stage in costs.stages.items():
        table["F"][number] = stage.forward_s
        table["B"][number], table["I"][number], table["W"][number] = stage.backward_s, stage.input_s, stage.weight_s
        if number in halved:  # then all of its forwards prepare that, and a whole backward is both halves on end
            table["F"][number] = stage.halved_forward_s or stage.forward_s
            table["B"][number] = _plus(stage.input_s, stage.weight_s)
        table["R"][number] = stage.recompute_s or (0.0,) * len(stage.forward_s)
        if any(stage.recompute_s):
            if redone is None:
                redone = {(action.stage, action.index) for action in actions if action.kind == "R"}
            inside = [0.0 if (number, j) in redone else seconds for j, seconds in enumerate(stage.recompute_s)]
            table["B"][number] = _plus(table["B"][number], inside)
            table["I"][number] = _plus(stage.input_s, inside)
        if any(stage.fetch_s):
            early = {action.index for action in actions if action.kind == "RELOAD" and action.stage == number}
            fetched = [-seconds if j in early else 0.0 for j, seconds in enumerate(stage.fetch_s)]
            table["B"][number] = _plus(table["B"][number], fetched)
            table["I"][number] = _plus(table["I"][number], fetched)
    return table


def exchange_s(actions: Sequence[Action], costs: RankCosts | None) -> float:
    """Seconds in which a rank exchanges something inside of its passes; 0 for an idle rank."""
    if costs is None:
        return 0.0
    inside = {n: stage.exchanges for n, stage in costs.stages.items() if stage.exchanges is not None}
    if not inside:
        return 0.0
    table, total = seconds_of(actions, replace(costs, stages=inside)), 0.0
    for action in actions:
        if action.kind in table and action.stage in inside and action.index is not None:
            total += table[action.kind][action.stage][action.index]
    return total


def _plus(seconds: Sequence[float], more: Sequence[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(seconds, more, strict=False))


def cuts_of(actions: Sequence[Action], costs: RankCosts | None, reductions: Sequence[Action]) -> dict[int, list[float]]:
    """Where to cut which actions: at the fractions of the last backward of a stage at which buckets become complete."""
    if costs is None or not reductions:
        return {}
    fractions: dict[int, set[float]] = {}
    for action in reductions:
        for stage, fraction in costs.ready.get(action.index or 0, ()):
            fractions.setdefault(stage, {1.0}).add(_within(fraction))
    last = {action.stage: place for place, action in enumerate(actions) if action.kind in ("B", "W")}
    return {last[stage]: sorted(cuts - {0.0}) for stage, cuts in fractions.items() if stage in last}


def completes(costs: RankCosts, action: Action, ends: Mapping[tuple[int, float], int], begin: int) -> tuple[int, ...]:
    """The tasks at whose end a bucket is complete on a rank; ``begin`` is its first one."""
    parts = costs.ready[action.index or 0]
    return tuple(ends[stage, _within(fraction)] for stage, fraction in parts) or (begin,)


def _within(fraction: float) -> float:
    return min(1.0, max(0.0, fraction))
