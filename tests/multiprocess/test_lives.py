"""Scripts that change things between steps: followed as plain PyTorch does, or refused by name (`benchmarks/lives.py` runs more)."""

from __future__ import annotations

import copy
import itertools
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from life.draw import OF_OPTIMIZER, SUBJECTS, Life, changes_of, draw
from life.judge import FAILURES, outcome_of
from life.lived import alone, lived
from life.script import SCRIPT, Line, Record, number_of
from multiprocess.pool import Pool, World

ALONE = World(rank=0, world_size=1)


# Not drawn here while they come out wrong, or are refused without a name: take out of these what is mended. The benchmark draws them all.
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random=st.randoms(use_true_random=False))
def test_what_a_script_changes_is_followed_or_refused_by_name(pool: Pool, random: Random) -> None:
    life = draw(random)
    outcome = lived(pool, life)
    assert outcome.what not in FAILURES, f"{outcome}\n{life.script()}"


def life_of(*lines: str, subject: str = "temperature", names: tuple[str, ...] = ("temperature",)) -> Life:
    """Six steps, and before each but the first the next one of the lines."""
    script = [Line(0)]
    for step in range(1, 6):
        script += [Line(step, "change", names, line) for line in lines[step - 1 : step]]
        script.append(Line(step))
    return Life(subject, "sgd", (("data", tuple(script)),))


@pytest.mark.parametrize(("name", "optimizer"), list(zip(SUBJECTS, itertools.cycle(OF_OPTIMIZER), strict=False)))
def test_plain_pytorch_runs_whatever_can_be_drawn(name: str, optimizer: str) -> None:
    script = [Line(0)]
    for step, change in enumerate(changes_of(SUBJECTS[name], optimizer), 1):
        for value in change.values[-1:] + change.values[:1] or ("",):
            script.append(
                Line(step, change.kind, change.names, change.line.format(value) if change.values else change.line)
            )
            script.append(Line(step))
    life = Life(name, optimizer, (("data", tuple(script)),))
    plain, exact = alone(ALONE, life)
    outcome = outcome_of(life, plain, exact, [[record] * 2 for record in copy.deepcopy(plain)])
    assert outcome.what == "followed", outcome.told


def judged(life: Life, change: str) -> str:
    """What is told of two ranks that did as plain PyTorch but for a fault."""
    plain, exact = alone(ALONE, life)
    first, second = copy.deepcopy(plain[0]), copy.deepcopy(plain[0])
    places = {line.step: place for place, line in enumerate(life.parts[0][1]) if not line.line}

    def stop(record: Record, step: int, **how: str) -> None:
        del record.values[places[step] :]
        record.end.clear()
        vars(record).update(how)

    match change:
        case "a loss":
            second.values[places[3]][0] *= 1 + 1e-4
        case "a weight":
            first.end["model"]["head.weight"][0] += 1e-3
        case "a state":
            del first.end["optimizer"]["head.weight momentum_buffer"]
        case "not a number":
            first.values[places[2]][0] = float("nan")
        case "refused" | "without a name" | "by its line":
            number = number_of(1)
            told = {"refused": "'temperature' was 1.0", "by its line": f"{SCRIPT}:{number}: a change"}.get(change, "no")
            for record in (first, second):
                stop(record, 1, refused=told)
        case "too late":
            for record in (first, second):
                record.values[places[1]][0] *= 1.01
                stop(record, 2, refused="'temperature' was 1.0")
        case "on one rank":
            stop(first, 1, refused="'temperature' was 1.0")
            stop(second, 1, crashed="RuntimeError: Connection closed by peer")
        case "at other steps":
            stop(first, 1, refused="'temperature' was 1.0")
            stop(second, 2, refused="'temperature' was 1.0")
        case "one crashed":
            stop(first, 4, refused="WorkerError: a collective broke off")
            stop(second, 4, crashed="RuntimeError: The size of tensor a must match")
        case "crashed":
            for record in (first, second):
                stop(record, 4, crashed="KeyError: 'lr'")
        case "never came back":
            return outcome_of(life, plain, exact, [], hung=True).what
    found = outcome_of(life, plain, exact, [[first, second]])
    return f"{found.what} {found.step}"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("nothing", "followed 5"),
        ("a loss", "wrong 3"),
        ("a weight", "wrong 5"),
        ("a state", "wrong 5"),
        ("not a number", "wrong 2"),
        ("refused", "refused 1"),
        ("by its line", "refused 1"),
        ("without a name", "nameless 1"),
        ("too late", "wrong 1"),
        ("on one rank", "nameless 1"),
        ("at other steps", "nameless 1"),
        ("crashed", "traceback 4"),
        ("one crashed", "traceback 4"),
        ("never came back", "hung"),
    ],
)
def test_the_judge_sees_each_fault(change: str, told: str) -> None:
    assert judged(life_of("model.temperature = 0.5"), change) == told


def test_a_change_on_one_rank_that_nobody_notices_is_wrong() -> None:
    script = (Line(0), Line(1, "on one rank alone", ("rank 1",), "model.temperature = 0.5", 1), Line(1))
    life = Life("temperature", "sgd", (("data", script),))
    plain, exact = alone(ALONE, life)
    assert outcome_of(life, plain, exact, [[*plain, *plain]]).told == "not noticed"


def test_the_seed_alone_says_what_is_drawn() -> None:
    state = torch.get_rng_state()
    assert [draw(Random("0/7")) for _ in range(2)] == [draw(Random("0/7"))] * 2
    assert torch.equal(torch.get_rng_state(), state)
