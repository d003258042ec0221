"""What each idea of the search is worth: switched off by itself, how much longer plans become, and what part of the search it takes.

An idea is switched off from here alone: what carries it in `heterodyne.search` is replaced for the time of one search. Rows are small
random fleets (of `planner_optimality`, by their number), fleets of `planner_golden`, and for ideas of the search over devices its devices
(`device_cases`, compared by their step with its doubt); among them those that are known to need an idea, since most need few. An idea
that finds plans has to make some plan shorter, or it is not worth its lines. Others only save time (``saves``): without one no plan may
become shorter, which would mean that it passes over plans that count. What is for cases that are not here says so (``judged_by``).
``part_of_search``: of the processor's time of the whole search, what goes when the idea goes; below 0 it saves that.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from time import process_time
from typing import Any, Literal
from unittest.mock import patch

from results import DATA, ROOT, Results

sys.path.insert(0, str(ROOT / "tests"))

import planner_golden
import planner_optimality
from device_cases import DeviceCase, device_cases

from heterodyne.errors import InfeasibleError
from heterodyne.search import by_class, data_parallel, families, finer_cuts, proposals, refine, sharding, split
from heterodyne.search.fleet import (
    climbing,
    columns,
    cutter,
    evaluator,
    fleet_wires,
    kinds,
    lower_bound,
    mixes,
    neighbourhood,
    pipeline_table,
    predict,
    search,
    template_search,
)
from heterodyne.search.fleet.plan import INTERLEAVED
from heterodyne.search.fleet.planner import FleetPlanner
from pure.search.fleet.small import drawn, search_of

Where = Literal["few", "fleets", "devices"]
Rows = tuple[Where, ...]
FEW = tuple(map(str, (0, 1, 2, 11, 18, 22, 23, 24, 29, 34, 40, 73, 103, 132, 194)))
QUICK_FEW, ALL_FEW = ("1", "11", "194"), tuple(map(str, range(300)))
FLEETS = (
    "OPT-350M on 32 GPUs of 2 kinds",
    "Llama-3-8B on 128 GPUs of 3 kinds",
    "OPT-350M, 8 A100-40 + 8 V100-16, overlapping",
    "drawn 2, ",
    "drawn 4, ",
)
DEVICES = ("4 CPUs, slow links", "4 CPUs, unlike blocks", "4 CPUs, statistics")
EQUAL = 1e-9
Replaced = tuple[object, str, Any]
Judged = tuple[float | None, float]
"""Seconds that candidates are compared by, None where there is no plan; and seconds of the processor."""


@dataclass(frozen=True)
class Idea:
    """Args:
    off: what is replaced, by what.
    where: the rows that it is for. ``also``: one more that is known to need it.
    saves: whether it only saves time.
    judged_by: the benchmark that has cases for it, if it is for others than these.
    """

    name: str
    off: tuple[Replaced, ...]
    where: Rows
    also: str
    saves: bool
    judged_by: str


def _idea(
    name: str,
    *off: Replaced,
    where: Rows = ("few", "fleets"),
    also: str = "",
    saves: bool = False,
    judged_by: str = "",
) -> Idea:
    return Idea(name, off, where, also, saves, judged_by)


def _none(*_: object, **__: object) -> Iterator[Any]:
    return iter(())


def _empty(*_: object, **__: object) -> list[Any]:
    return []


def _no_plan(*_: object, **__: object) -> None:
    return None


def _same(_: object, found: Any, *__: object, **___: object) -> Any:
    """Of a method: its first argument."""
    return found


def _as_is(*found: Any) -> Any:
    """Of a function: all that it is given."""
    return found


def _relaxed_but(wanted: Callable[[Any], bool]) -> Replaced:
    """Without the relaxations for some quantiles of the exposed exchange."""
    whole = columns._fastest

    def fastest(pipelines: Any, fleet: Any, limits: Any, samples: int, quantiles: Any) -> Any:
        return whole(pipelines, fleet, limits, samples, quantiles) if wanted(quantiles) else None

    return columns, "_fastest", fastest


class _Even(fleet_wires.Wires):
    """All links alike."""

    @property
    def byte_s(self) -> Any:
        return 0.0 * super().byte_s


def _climbed_but(wanted: Callable[[Any], bool]) -> Replaced:
    whole = climbing.Climbing._climbed

    def climbed(self: Any, best: Any, starts: Any, schedules: Any) -> Any:
        return whole(self, best, starts, schedules) if wanted(schedules) else best

    return climbing.Climbing, "_climbed", climbed


def _rescheduled_but(wanted: Callable[[Any], bool]) -> Replaced:
    whole = climbing.Climbing.rescheduled

    def rescheduled(self: Any, best: Any, schedules: Any) -> Any:
        return whole(self, best, schedules) if wanted(schedules) else best

    return climbing.Climbing, "rescheduled", rescheduled


def _first_cuts(count: int) -> Replaced:
    whole = cutter.Cutter.cut

    def cut(*given: Any) -> list[Any]:
        return [template for template, _ in zip(whole(*given), range(count), strict=False)]

    return cutter.Cutter, "cut", cut


def _no_pool_alone() -> Replaced:
    whole = template_search.TemplateSearch.found

    def found(self: Any) -> list[Any]:
        return [] if len(self.room) > 1 and sum(self.room > 0) == 1 else whole(self)

    return template_search.TemplateSearch, "found", found


def _not_exact() -> Replaced:
    whole = pipeline_table.PipelineTable.found.__func__  # type: ignore[attr-defined]

    def found(cls: Any, predictor: Any, space: Any, of: Any, zero: int, _: int | None) -> Any:
        return whole(cls, predictor, space, of, zero)

    return pipeline_table.PipelineTable, "found", classmethod(found)


def _first_level() -> Replaced:
    whole = search.Search._levels

    def levels(self: Any) -> list[Any]:
        return [next(iter(whole(self)))]

    return search.Search, "_levels", levels


def _no_own_order(*_: object, **__: object) -> None:
    raise InfeasibleError("switched off")


def _split_but(kind: str) -> Replaced:
    whole = split.Split.candidates

    def candidates(self: Any, wanted: Any, below_s: float) -> Any:
        return whole(self, [own for own in wanted if own != kind], below_s)

    return split.Split, "candidates", candidates


def ideas() -> tuple[Idea, ...]:
    """Return every idea, in the order in which a search has them."""
    of, climb = search.Search, climbing.Climbing
    move = neighbourhood.Neighbourhood
    cut, refined, weighed = finer_cuts.FinerCuts, refine.Refiner, by_class.ByClass
    lines, many = finer_cuts._Lines, mixes.Mixes
    few: Rows = ("few",)
    fleets: Rows = ("fleets",)
    on: Rows = ("devices",)
    return (
        _idea("all orders of pools", (pipeline_table, "_reordered", _as_is), where=fleets),
        _idea("other widths over a pool", (pipeline_table, "_ROUNDS", 0), where=fleets),
        _idea("surplus stages left out", (pipeline_table, "_without_surplus", lambda runs, *_: runs), where=fleets, also="a 1.8T mixture"),
        _idea("each pool by itself", _no_pool_alone(), where=fleets),
        _idea("a stage less than there are devices for", (template_search, "_LESS", (0,)), where=fleets),
        _idea("two pipelines for the same devices", (pipeline_table, "_KEPT", 1), where=fleets),
        _idea("estimates with split backwards", (pipeline_table._OfSize, "_filling", 1.0), where=fleets, also="Llama-3-70B"),
        _idea("exact search of few devices", _not_exact(), where=few),
        _idea("three pipelines for the same few devices", (pipeline_table, "_EXACT", 1), where=few),
        _idea("further ZeRO levels and shards", _first_level()),
        _idea("cuts for very many micro-batches", _first_cuts(1)),
        _idea("cuts with memory for split backwards", _first_cuts(2)),
        _idea("alike pipelines first", (of, "_alike", lambda *_: None)),
        _idea("unlike pipelines", (of, "_mixed", _same)),
        _idea("relaxations by exposed exchange", (columns, "_QUANTILES", (1.0, 1.0))),
        _idea("relaxations of alike cuts", _relaxed_but(lambda own: own != (1.0,)), also="drawn 18, "),
        _idea("a relaxation without exchange", _relaxed_but(lambda own: own is not None)),
        _idea("relaxations without slow links", (columns, "Wires", _Even), also="a 1.8T mixture"),
        _idea("columns by reduced value", (columns, "_of_value", _none)),
        _idea("columns by pairs", (columns, "_paired", _empty), where=few, also="drawn 5, "),
        _idea("columns for later times", (columns, "_LATER", (1.0,))),
        _idea("counts by integer programming", (many, "unlike", _none)),
        _idea("counts with the exchange in their time", (many, "_once_s", lambda _, own: [0.0] * len(own)), also="a 1.8T mixture"),
        _idea("pairs of columns", (many, "pairs", _empty)),
        _idea("fewer alike pipelines", (many, "alike", _empty), also="4 unlike GPUs apart, slow links"),
        _idea("pipelines beside the best", (of, "_beside", _empty), also="GPT-Neo-2.7B, 32 A100-40 + 96 V100-16, overlapping"),
        _idea("mixes for smaller bubbles", (of, "_propose", _no_plan)),
        _idea("other plain schedules", _rescheduled_but(lambda own: not INTERLEAVED.isdisjoint(own))),
        _idea("interleaved schedules", _rescheduled_but(INTERLEAVED.isdisjoint)),
        _idea("local search", (climb, "improved", _same)),
        _idea("local search of interleaved pipelines", _climbed_but(INTERLEAVED.isdisjoint), where=few),
        _idea("local search from several starts", (climbing, "_STARTS", 1), (climbing, "_STARTS_OF_FEW", 1)),
        _idea("local search from unlike starts", (climbing, "_UNLIKE", 0), also="drawn 6, "),
        _idea("move: cut anew over other stages", (move, "_cut_anew", _none)),
        _idea("move: a layer over a border", (move, "_moved", _none)),
        _idea("move: virtual stages", (move, "_chunked", _none), (move, "_within_places", _none)),
        _idea("move: other widths", (move, "_rewidened", _none)),
        _idea("move: another micro-batch", (move, "_resized", _none)),
        _idea("move: recompute", (move, "_recomputed", _none)),
        _idea("move: devices that are left over", (move, "_filled", _empty)),
        _idea("move: all of a pool cut alike", (move, "_aligned", _none), also="GPT-Neo-2.7B, 16 A100-40 + 16 V100-16, waiting"),
        _idea("move: a pipeline less, or another", (move, "_without_one", _none), also="drawn 19, "),
        _idea("move: another for two pipelines", (move, "_without_two", _none)),
        _idea("move: stages exchanged between pipelines", (move, "_exchanged", _none)),
        _idea("end: near the bound by covering", (lower_bound.Cover, "of", _no_plan), saves=True),
        _idea("bounds of neighbours", (climb, "_could_beat", lambda self, mix, *_: self._limits.allows(mix)), saves=True),
        _idea("schedules that are no faster", (evaluator.Evaluator, "_no_faster", lambda *_: False), saves=True),
        _idea("bounds of mixes", (predict.Predictor, "bound_at_most", lambda *_, **__: True), saves=True),
        _idea("dominated widths left out", (kinds, "undominated", lambda own, _: own), saves=True),
        _idea("larger micro-batches where faster", (kinds, "_SOONER", inf), where=fleets, saves=True),
        _idea("plans refined for their devices", (weighed, "_refined", _empty), where=on),
        _idea("cuts inside blocks", (cut, "shapes", _none), where=on),
        _idea("idle devices that join", (lines, "_with", _none), where=on),
        _idea("ranks exchanged", (lines, "_exchanged", _none), where=on, also="4 unlike GPUs in one node"),
        _idea("two stages on each rank", (cut, "_two_on_each", _none), where=on, also="4 unlike GPUs apart, slow links"),
        _idea("orders of their own", (refine, "ordered", _no_own_order), where=on),
        _idea("borders moved for an order", (refined, "_moved", lambda _, own, *__: own), where=on, also="16 GPUs of 4 kinds, slow links"),
        _idea("activations back ahead of time", (weighed, "_reloaded", _none), where=on, judged_by="offload"),
        _idea("pipelines that share state", (weighed, "_sharded", _empty), where=on, judged_by="sharded_state"),
        _idea("weights split", _split_but("split"), where=on, judged_by="uneven_tensor_parallel"),
        _idea("sequences split", _split_but("context"), where=on, judged_by="planner_here"),
        _idea("halves in turns", (split.Split, "overlapped", _empty), where=on, judged_by="overlap"),
        _idea("state sharded, of plans", (sharding.Sharding, "of_plans", lambda *_: ()), where=on, judged_by="sharded_state"),
        _idea("state sharded, of whole models", (sharding.Sharding, "of_whole_models", _none), where=on),
        _idea("samples moved", (data_parallel.DataParallel, "_refine", _same), where=on, judged_by="planner_here"),
        _idea("fewer devices", (proposals.Proposer, "fewer", _empty), where=on, judged_by="planner_here"),
        _idea("parameters sharded", (families.Families, "_parameters_sharded", _none), where=on, judged_by="memory_limits"),
        _idea("state on hosts", (families.Families, "_on_hosts", _none), where=on, judged_by="offload"),
    )  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A row without an idea; ``idea``: its number, None: with all."""

    idea: int | None
    where: Where
    row: str
    profiles: Path = field(compare=False)


def judged(job: Job) -> Judged:
    """Plan one row without an idea."""
    planned = _planner(job)
    with ExitStack() as stack:
        for owner, name, value in () if job.idea is None else ideas()[job.idea].off:
            stack.enter_context(patch.object(owner, name, value))
        began = process_time()
        try:
            found = planned()
        except InfeasibleError:
            found = None
        return found, process_time() - began


def _planner(job: Job) -> Callable[[], float | None]:
    if job.where == "few":
        number = int(job.row)
        devices, blocks, ways = planner_optimality.SIZES[number % len(planner_optimality.SIZES)]
        own = search_of(*drawn(random.Random(number), devices=devices, blocks=blocks, ways=ways))

        def smallest() -> float | None:
            best = own.run()
            return None if best is None else best.predicted.step_s

        return smallest
    if job.where == "devices":
        case = _device_cases()[job.row]
        case.prepare()
        return lambda: case.plan().chosen.weighed_s
    (row,) = (case for case in planner_golden.cases(job.profiles) if case.name == job.row)
    planner = FleetPlanner(fleet=row.fleet, costs=row.costs(), global_batch=row.global_batch, software=row.software)
    return lambda: planner.plan().best.predicted.step_s


@cache
def _device_cases() -> dict[str, DeviceCase]:
    return {case.name: case for case in device_cases()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a form of at most two minutes")
    parser.add_argument("--all", action="store_true", help="every row for every idea, for hours")
    parser.add_argument("--only", metavar="TEXT,...", default="", help="the ideas with one of these in their names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here as JSON")
    parser.add_argument("--profiles", type=Path, default=DATA / "layer_profiles.json")
    options = parser.parse_args()
    results = Results("planner_ablation")
    wanted = {n: own for n, own in enumerate(ideas()) if any(text in own.name for text in options.only.split(","))}
    rows = _rows(options)
    without = {number: rows_of(idea, rows) for number, idea in wanted.items()}
    with_all = [
        Job(None, *row, options.profiles) for row in dict.fromkeys(job for own in without.values() for job in own)
    ]
    # A first search of a row fills what is kept between searches, so the second one is timed.
    jobs = [*(job for job in with_all if job.row in rows[job.where][1]), *with_all]
    jobs += [Job(number, *row, options.profiles) for number, own in without.items() for row in own]
    found: dict[Job, Judged] = {}
    nothing, shorter = [], 1.0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for place, (job, own) in enumerate(zip(jobs, pool.map(judged, jobs), strict=True)):
            found[job] = own
            if job.idea is None or (place + 1 < len(jobs) and jobs[place + 1].idea == job.idea):
                continue
            idea = wanted[job.idea]
            most, least = _worth(results, idea, {j: it for j, it in found.items() if j.idea == job.idea}, found)
            if idea.saves:
                shorter = min(shorter, least)
            elif most <= 1 + EQUAL and not idea.judged_by:
                nothing.append(idea.name)
    if not options.quick:
        results.bar("ideas without which no plan is longer", len(nothing), "<= 0")
    # A search ends within a hundredth of its bound, so what ends it sooner may miss as much.
    results.bar("shortest step without what only saves time, over that with it", shorter, ">= 0.99")
    return results.write(options.json)


def _rows(options: argparse.Namespace) -> dict[Where, tuple[Sequence[str], Sequence[str]]]:
    """Names of all rows, and of those for every idea."""
    fleets = [case.name for case in planner_golden.cases(options.profiles)]
    every: dict[Where, Sequence[str]] = {"few": ALL_FEW, "fleets": fleets, "devices": list(_device_cases())}
    if options.all:
        return {where: (own, own) for where, own in every.items()}
    quick = options.quick
    heads = {"few": (), "fleets": FLEETS[: 1 if quick else None], "devices": DEVICES[1:2] if quick else DEVICES}
    kept = {where: [name for name in own if name.startswith(tuple(heads[where]))] for where, own in every.items()}
    kept["few"] = list(QUICK_FEW if quick else FEW)
    return {where: ([] if quick else own, kept[where]) for where, own in every.items()}


def rows_of(idea: Idea, rows: Mapping[Where, tuple[Sequence[str], Sequence[str]]]) -> list[tuple[Where, str]]:
    """Return the rows of an idea, each with where it is from."""
    found: dict[tuple[Where, str], None] = {}
    for where, (every, kept) in rows.items():
        found.update({(where, row): None for row in kept if where in idea.where})
        found.update({(where, row): None for row in every if idea.also and row.startswith(idea.also)})
    return list(found)


def _worth(
    results: Results, idea: Idea, without: Mapping[Job, Judged], found: Mapping[Job, Judged]
) -> tuple[float, float]:
    """The longest and the shortest step without an idea over that with it."""
    ratios, cpu_s, whole_s, worst = [1.0], 0.0, 0.0, ""
    for job, (step_s, own_s) in without.items():
        known_s, with_s = found[Job(None, job.where, job.row, job.profiles)]
        cpu_s, whole_s = cpu_s + own_s, whole_s + with_s
        if known_s is None:
            continue
        ratios.append(inf if step_s is None else step_s / known_s)
        worst = job.row if ratios[-1] == max(ratios) and ratios[-1] > 1 + EQUAL else worst
    results.row(
        idea.name,
        rows=len(ratios) - 1,
        longer=sum(own > 1 + EQUAL for own in ratios),
        most_longer=max((own for own in ratios if own < inf), default=1.0) - 1,
        no_plan=ratios.count(inf),
        worst=worst,
        shorter=sum(own < 1 - EQUAL for own in ratios),
        most_shorter=1 - min(ratios),
        part_of_search=1 - cpu_s / whole_s,
        kind="saves time" if idea.saves else f"judged by {idea.judged_by}" if idea.judged_by else "finds plans",
    )
    return max(ratios), min(ratios)


if __name__ == "__main__":
    sys.exit(main())
