"""Places with several stages: what they hold, and how they come to have them."""

from __future__ import annotations

import random

import pytest

from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.held import peak_bytes
from heterodyne.plan.schedules.times import StageBytes
from heterodyne.search.fleet.plan import INTERLEAVED, ScheduleName, Template, TemplateStage, chunked
from heterodyne.search.fleet.space import Space
from pure.search.fleet.small import drawn, search_of

SCHEDULE_NAMES = Space().schedules


def _template(pools: list[str], chunks: int, layers: int, chance: random.Random) -> Template:
    cuts = sorted(chance.sample(range(1, layers), len(pools) * chunks - 1))
    stages = tuple(
        TemplateStage(pool=pools[number % len(pools)], start=start, stop=stop)
        for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, layers], strict=True))
    )
    return Template(micro_batch=1, stages=stages, chunks=chunks)


@pytest.mark.parametrize("schedule", sorted(INTERLEAVED))
def test_memory_of_a_place_is_the_sum_over_its_stages(schedule: ScheduleName) -> None:
    chance = random.Random(2)
    for number in range(10):
        fleet, costs, samples = drawn(random.Random(number), blocks=8)
        layers = len(costs.layers)
        if layers < 4:
            continue
        template = _template([fleet.pools[0].name, fleet.pools[-1].name], 2, layers, chance)
        predictor = search_of(fleet, costs, samples).predictor
        tables = predictor.stage_tables.of(template)
        for count in (1, 3, 9):
            each = [
                table.memory(s.start, s.stop, recompute=False, held=1, replicas=2, zero=1)
                for s, table in zip(template.stages, tables, strict=True)
            ]
            held = peak_bytes(
                SCHEDULES[schedule].orders(2, 2, count), [StageBytes(activation=int(m.activations)) for m in each]
            )
            for place in range(2):
                own = each[place::2]
                fixed = sum(m.parameters + m.gradients + m.optimizer for m in own) + max(m.passing for m in own)
                told = predictor.pipeline_memory.memory(
                    template, micro_batches=count, schedule=schedule, replicas=2, zero=1
                )
                assert told[place].total == pytest.approx(fixed + held[place], abs=8 * count)


def test_the_most_micro_batches_fit_and_the_next_do_not() -> None:
    chance = random.Random(3)
    for number in range(30):
        fleet, costs, samples = drawn(random.Random(number), blocks=8)
        layers = len(costs.layers)
        if layers < 4:
            continue
        schedule = chance.choice(SCHEDULE_NAMES)
        chunks = 2 if schedule in INTERLEAVED else 1
        template = _template([fleet.pools[0].name, fleet.pools[-1].name], chunks, layers, chance)
        predictor = search_of(fleet, costs, samples).predictor
        most = predictor.pipeline_memory.most_micro_batches(template, schedule, 1, 0)
        fits = [
            count
            for count in range(1, samples + 1)
            if all(
                need.total <= fleet.pool(home.pool).memory_bytes
                for need, home in zip(
                    predictor.pipeline_memory.memory(
                        template, micro_batches=count, schedule=schedule, replicas=1, zero=0
                    ),
                    template.homes,
                    strict=True,
                )
            )
        ]
        assert most == max(fits, default=0)


def test_places_keep_their_layers_when_they_get_more_stages() -> None:
    chance = random.Random(4)
    for _ in range(100):
        layers, places = chance.randint(8, 40), chance.randint(1, 4)
        template = _template([f"p{n}" for n in range(places)], 1, layers, chance)
        for chunks in range(1, 5):
            for made in chunked(template, chunks):
                assert made.chunks == chunks
                assert made.devices == template.devices
                assert made.stages[0].start == 0
                assert made.stages[-1].stop == layers
                assert all(a.stop == b.start for a, b in zip(made.stages, made.stages[1:], strict=False))
                sizes = [stage.stop - stage.start for stage in made.stages]
                assert min(sizes) >= 1
                if min(stage.stop - stage.start for stage in template.stages) >= chunks:
                    for place, stage in enumerate(template.stages):
                        own = sizes[place::places]
                        assert sum(own) == stage.stop - stage.start
                        assert max(own) - min(own) <= 1


def test_stages_of_a_place_that_are_not_alike_are_refused() -> None:
    stages = tuple(TemplateStage(pool=f"p{n % 2}", start=n, stop=n + 1) for n in range(4))
    assert Template(micro_batch=1, stages=stages, chunks=2).places == 2
    with pytest.raises(ValueError, match="share a place, and are not alike"):
        Template(micro_batch=1, stages=(*stages[:2], *stages[:1:-1]), chunks=2)
    with pytest.raises(ValueError, match="cannot be 3 on each place"):
        Template(micro_batch=1, stages=stages, chunks=3)
    with pytest.raises(ValueError, match="leave none"):
        Space(schedules=("Interleaved1F1B",))
