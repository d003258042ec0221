"""The fleet planner next to what is done without one, on measured layers: throughput, money and the time of the search.

OPT-350M and GPT-Neo-2.7B, global batch 1,024, on A100-40 and V100-16 half and half and one to three, and with GH-96 beside them. The
others: equal shares on all devices (as many micro-batches for each replica, the same width and size for all), each kind alone (planned
with all that the planner can do), and two alike stages on two kinds with the best uneven cut, width and size, by brute force. All under
the same played time, layouts and schedules, with the optimizer state sharded or not, whichever is better.

And every plan of alike pipelines of up to eight stages in which those of a kind follow each other at one tensor width, for software that
overlaps and for software that waits for its messages and exchanges gradients in the open (as DeepSpeed does): the planner must find none
of them faster than its own (`contiguous`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from time import perf_counter

from contiguous import Contiguous
from fleets import fleet_of, with_profiles
from layer_profiles import LayerProfiles, read_layer_profiles
from results import Results

from heterodyne.cluster.fleet import Fleet
from heterodyne.cost.layers import Widths
from heterodyne.errors import InfeasibleError
from heterodyne.predictor.software import Software
from heterodyne.search.fleet.plan import Candidate, Template, TemplateGroup, TemplateStage, mix_of
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.search import Search
from heterodyne.search.fleet.space import Space

MODELS = {"OPT-350M": "OPT-350", "GPT-Neo-2.7B": "GPT-Neo-2.7"}
FLEETS = (
    {"A100-40": 8, "V100-16": 8},
    {"A100-40": 16, "V100-16": 16},
    {"A100-40": 32, "V100-16": 96},
    {"GH-96": 8, "A100-40": 16, "V100-16": 16},
)
EVERY = (
    {"A100-40": 4, "V100-16": 4},
    {"A100-40": 16, "V100-16": 16},
    {"A100-40": 32, "V100-16": 96},
    {"GH-96": 8, "A100-40": 16, "V100-16": 16},
    {"GH-96": 32, "A100-40": 32, "V100-16": 64},
)
"""For every contiguous plan."""
TWO_STAGES = "two stages, uneven cut"
SAMPLES = 1024
MORE, PROVEN = 1.02, 1.01
"""What the planner should gain over two alike stages, or else how near to its bound it should be."""


def main() -> int:
    options = with_profiles(__doc__)
    results = Results("planner_quality")
    ratios: list[float] = []
    worth: list[bool] = []
    for name, key in MODELS.items():
        costs = read_layer_profiles(options.profiles, key)
        for counts in FLEETS[:2] if options.quick else FLEETS:
            fleet = fleet_of(counts)
            planner = FleetPlanner(fleet=fleet, costs=costs, global_batch=SAMPLES)
            began = perf_counter()
            planned = planner.plan()
            taken_s = perf_counter() - began
            ours = planned.best
            where = f"{name}, {fleet.name}"
            _row(results, where, "ours", ours, ours, taken_s)
            cheap = planner.plan(replace(planned.objective, goal="money")).best
            _row(results, where, "ours, least money", cheap, ours, None)
            search = planner.search(Space())
            for what, other in (
                ("equal shares", _equal(search, costs)),
                *((f"{pool.kind} alone", _alone(planner, pool.name)) for pool in fleet.pools),
                (TWO_STAGES, _two_stages(search, costs)),
            ):
                if other is None:
                    results.row(f"{where}: {what}", fits="no")
                else:
                    _row(results, where, what, other, ours, None)
                    ratios.append(other.predicted.step_s / ours.predicted.step_s)
                    if what == TWO_STAGES:
                        near = ours.predicted.step_s <= PROVEN * planned.bound_s
                        worth.append(ratios[-1] >= MORE or near)
    results.bar("least gain over every other way", min(ratios), ">= 1.0")
    share = sum(worth) / len(worth)
    results.bar("fleets with 2% over a two-stage cut, or a step within 1% of its bound", share, ">= 1.0")
    for overlap in (True, False):
        least = min(_over_contiguous(results, options.profiles, overlap, EVERY[:2] if options.quick else EVERY))
        how = "overlapping" if overlap else "waiting for messages, gradients in the open"
        results.bar(f"least gain over every contiguous plan, {how}", least, ">= 1.0")
    return results.write(options.json)


def _over_contiguous(
    results: Results, profiles: Path, overlap: bool, fleets: Sequence[dict[str, int]]
) -> Iterator[float]:
    for name, key in MODELS.items():
        costs = read_layer_profiles(profiles, key)
        for counts in fleets:
            planner = FleetPlanner(
                fleet=fleet_of(counts),
                costs=costs,
                global_batch=SAMPLES,
                software=Software(overlap_sends=overlap, overlap_gradients=overlap),
            )
            planned = planner.plan()
            every = Contiguous(search=planner.search(Space()), best=planned.best)
            best = every.run()
            assert best is not None
            gain = best.predicted.step_s / planned.best.predicted.step_s
            results.row(
                f"{name}, {planner.fleet.name}, {'overlapping' if overlap else 'waiting'}: every contiguous plan",
                gain=gain,
                weighed=every.weighed,
                step_s=planned.best.predicted.step_s,
                over_bound=planned.best.predicted.step_s / planned.bound_s,
            )
            yield gain


def _row(results: Results, where: str, what: str, own: Candidate, ours: Candidate, taken_s: float | None) -> None:
    figures = {
        "samples_per_s": own.predicted.samples_per_s,
        "usd": own.predicted.usd,
        "devices": own.predicted.devices,
        "times_as_long": own.predicted.step_s / ours.predicted.step_s,
    }
    results.row(f"{where}: {what}", **figures, **({} if taken_s is None else {"search_s": taken_s}))


def _best(found: Iterator[Candidate | None]) -> Candidate | None:
    return min((weighed for weighed in found if weighed is not None), key=lambda w: w.predicted.step_s, default=None)


def _equal(search: Search, costs: LayerProfiles) -> Candidate | None:
    """The same width, size and number of micro-batches on every device: the slowest kind decides."""

    def options() -> Iterator[Candidate | None]:
        layers = len(costs.layers)
        for width, size in product((1, 2, 4, 8), search.kinds.sizes):
            if any(search.tables.table(pool.kind, Widths(width), size) is None for pool in search.fleet.pools):
                continue
            mix = mix_of(
                (
                    Template(
                        micro_batch=size,
                        stages=(
                            TemplateStage(
                                pool=pool.name, widths=Widths(tensor=width), start=0, stop=layers, recompute=again
                            ),
                        ),
                    ),
                    pool.devices // width,
                )
                for pool in search.fleet.pools
                for again in (_again(search, pool.name, width, size, layers),)
            )
            yield _in_equal_shares(search, mix)

    return _best(options())


def _again(search: Search, pool: str, width: int, size: int, layers: int) -> bool:
    """Whether the whole model has to be recomputed on a device of a pool."""
    own = search.fleet.pool(pool)
    table = search.tables.table(own.kind, Widths(width), size)
    assert table is not None
    replicas = search.fleet.devices // width
    return table.memory(0, layers, recompute=False, held=1, replicas=replicas, zero=1).total > own.memory_bytes


def _in_equal_shares(search: Search, mix: tuple[tuple[Template, int], ...]) -> Candidate | None:
    """As the predictor weighs it, but for the shares: its longest pipeline takes as many micro-batches as every other one."""
    weighed = search.evaluate(mix)
    if weighed is None:
        return None
    each = -(-SAMPLES // sum(n * t.micro_batch for t, n in mix))
    played = search.predictor.played(mix, weighed.plan.schedule, weighed.plan.layout, weighed.plan.zero)
    longest_s = max(own.seconds(each) for own in played.values())
    own = weighed.predicted
    step_s = longest_s + own.sync_s + own.update_s
    groups = tuple(TemplateGroup(template=t, replicas=n, num_microbatches=each) for t, n in mix)
    usd = None if own.usd is None else own.usd * step_s / own.step_s
    return replace(
        weighed,
        plan=replace(weighed.plan, groups=groups),
        predicted=replace(own, step_s=step_s, pipelines_s=longest_s, samples_per_s=SAMPLES / step_s, usd=usd),
    )


def _alone(planner: FleetPlanner, pool: str) -> Candidate | None:
    try:
        return planner.plan(space=Space(pools=(pool,))).best
    except InfeasibleError:
        return None


def _two_stages(search: Search, costs: LayerProfiles) -> Candidate | None:
    """One stage on each of two kinds, all pipelines alike: every cut, order, width and size."""
    return _best(search.evaluate(((template, count),)) for template, count in _pairs(search.fleet, search, costs))


def _pairs(fleet: Fleet, search: Search, costs: LayerProfiles) -> Iterator[tuple[Template, int]]:
    layers = len(costs.layers)
    for first, last in permutations(fleet.pools, 2):
        for size, a, b in product(search.kinds.sizes, costs.widths(first.kind), costs.widths(last.kind)):
            if a.copies > 1 or b.copies > 1:
                continue  # plain pipelines: nothing but tensor parallelism in a stage
            if a.devices > first.devices_per_node or b.devices > last.devices_per_node:
                continue
            if search.tables.table(first.kind, a, size) is None or search.tables.table(last.kind, b, size) is None:
                continue
            count = min(first.devices // a.devices, last.devices // b.devices)
            for cut, again in product(range(1, layers), product((False, True), repeat=2)):
                stages = (
                    TemplateStage(
                        pool=first.name, widths=Widths(tensor=a.tensor), start=0, stop=cut, recompute=again[0]
                    ),
                    TemplateStage(
                        pool=last.name, widths=Widths(tensor=b.tensor), start=cut, stop=layers, recompute=again[1]
                    ),
                )
                yield Template(micro_batch=size, stages=stages), count


if __name__ == "__main__":
    sys.exit(main())
