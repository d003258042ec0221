"""Sites that meet seldom, in real processes: exact where that can be, and one that is killed and comes back."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heterodyne.processes.port import reserve_port
from multiprocess.cli_job import Place, make_place
from multiprocess.crowd import PATIENCE_S, Crowd, Worker, launched, run_launched

JOB = """
model: {{factory: "model.py:build"}}
data: {{text: text.txt, sequence_length: 16, cache: cache}}
training:
  steps: {steps}
  global_batch_size: 8
  seed: 3
  validation_samples: 8
  clip_grad_norm: 0
  sync: {{sites: outer, shares: {{north: 5, south: 3}}, at: "127.0.0.1:{port}", grace_s: {grace_s}, {sync}}}
optimizer: {{name: sgd, lr: 0.2, momentum: 0, weight_decay: 0, schedule: constant}}
parallelism: {{micro_batch_sizes: [1], measure_s: 0.5, rehearsal_s: 0, check_s: 0}}
checkpoint: {{every: 5}}
metrics: {{tensorboard: false}}
"""
PLAIN = "lr: 1.0, momentum: 0"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = make_place(tmp_path_factory.mktemp("sites"))
    paused = (made.path / "model.py").read_text()
    paused = paused.replace("import os\n", "import os\nimport time\n").replace(
        "        return loss\n",
        "        if not torch.compiler.is_compiling():\n"
        "            time.sleep(float(os.environ.get('PAUSE_S', '0')))\n"
        "            while os.path.exists(os.environ.get('HELD_BY', '')):\n"
        "                time.sleep(0.01)\n"
        "        return loss\n",
    )
    (made.path / "model.py").write_text(paused)
    return made


@contextmanager
def job(place: Place, name: str, *, steps: int, sync: str, grace_s: float = 60) -> Iterator[str]:
    """A job file whose sites meet at a port that is free."""
    with reserve_port() as port:
        (place.path / name).write_text(JOB.format(steps=steps, port=port, sync=sync, grace_s=grace_s))
        yield name


def start(crowd: Crowd, place: Place, ranks: int, *arguments: str, **variables: str) -> list[Worker]:
    command = ["-m", "heterodyne", "train", *arguments]
    environment = {**place.environment, **variables}
    return [
        crowd.start(run_launched, command, str(place.path), environment, rank=rank, world_size=ranks)
        for rank in range(ranks)
    ]


def ended(workers: Sequence[Worker]) -> str:
    """Wait for a site that has to come to its end; what it said."""
    statuses = [worker.wait() for worker in workers]
    said = workers[0].output
    assert not any(statuses), said
    return said


def weights(place: Place, run: str) -> dict[str, torch.Tensor]:
    return load_file(place.path / run / "model" / "model.safetensors")


def unlike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a weight."""
    assert one.keys() == other.keys()
    return max(float((one[n].double() - other[n].double()).norm() / other[n].double().norm()) for n in one)


def outer_steps(place: Place, run: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (place.path / run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "outer_step" in line]


def wait_for(place: Place, run: str, step: int, worker: Worker) -> None:
    metrics: Path = place.path / run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and f'"step": {step},' in metrics.read_text(), worker)


def wait_until(so: Callable[[], bool], worker: Worker) -> None:
    until = time.monotonic() + PATIENCE_S
    while not so():
        assert time.monotonic() < until, worker.output
        time.sleep(0.02)


def test_a_plain_outer_step_after_each_step_is_the_training_of_the_whole_batch(place: Place) -> None:
    """Under unlike plans at the sites, one a pipeline and one data parallel, with dropout, whose masks belong to the samples."""
    with ExitStack() as stack:
        name = stack.enter_context(job(place, "exact.yaml", steps=6, sync=f"every: 1, {PLAIN}"))
        north, south, whole = (stack.enter_context(Crowd()) for _ in range(3))
        two = ("--cluster", "two.yaml")
        cut = ("--site", "north", "--run-dir", "north", "--set", "parallelism.strategy=pipeline")
        data = ("--site", "south", "--run-dir", "south", "--set", "parallelism.strategy=equal")
        sites = [start(north, place, 2, name, *two, *cut), start(south, place, 2, name, *two, *data)]
        one = start(whole, place, 1, name, "--run-dir", "one", "--set", "training.sync=null")
        ended(one)
        for said in map(ended, sites):
            assert "INEXACT, as asked for (training.sync)" in said
    plans = [json.loads((place.path / run / "plan.json").read_text())["pipelines"] for run in ("north", "south")]
    assert (len(plans[0]), len(plans[0][0]["stages"])) == (1, 2)
    assert len(plans[1]) == 2
    assert unlike(weights(place, "north"), weights(place, "one")) <= 1e-6
    assert unlike(weights(place, "south"), weights(place, "north")) == 0
    for run in ("north", "south"):
        assert [line["outer_step"] for line in outer_steps(place, run)] == [1, 2, 3, 4, 5, 6]
        assert all(line["sites"] == "north 62.5%, south 37.5%" for line in outer_steps(place, run))


def test_a_site_that_is_killed_is_done_without_and_comes_back(place: Place) -> None:
    held = place.path / "held"
    with ExitStack() as stack:
        sync = "every: 10, fragments: 2, delay: 1, bits: 8"
        name = stack.enter_context(job(place, "away.yaml", steps=60, sync=sync, grace_s=5.0))
        north, south, again = (stack.enter_context(Crowd()) for _ in range(3))
        [stays] = start(
            north, place, 1, name, "--site", "north", "--run-dir", "stays", PAUSE_S="0.02", HELD_BY=str(held)
        )
        away = ("--site", "south", "--run-dir", "away")
        [killed] = start(south, place, 1, name, *away, PAUSE_S="0.02")
        wait_for(place, "away", 18, killed)
        killed.signal(signal.SIGKILL)
        killed.wait()
        wait_for(place, "stays", 30, stays)
        held.touch()  # until the other one is back
        [back] = start(again, place, 1, name, *away, "--resume", PAUSE_S="0.02")
        wait_until(lambda: "site south has joined" in stays.output, stays)
        held.unlink()
        said, told = ended([back]), ended([stays])
    assert "site south did not come within 5 s" in told
    assert "site south has joined" in told
    assert "the other sites are further: going on after step" in said
    merged = outer_steps(place, "stays")
    alone = [line["outer_step"] for line in merged if "south" not in line["sites"]]
    assert alone[-1] < merged[-1]["outer_step"], "it was merged again"
    assert unlike(weights(place, "away"), weights(place, "stays")) == 0
    with ExitStack() as stack:
        north, south = (stack.enter_context(Crowd()) for _ in range(2))
        longer = ("--resume", "--set", "training.steps=70")
        sites = [
            start(crowd, place, 1, name, "--site", site, "--run-dir", run, *longer)
            for crowd, site, run in ((north, "north", "stays"), (south, "south", "away"))
        ]
        for site in sites:
            ended(site)
    for run in ("stays", "away"):
        lines = [json.loads(line) for line in (place.path / run / "metrics.jsonl").read_text().splitlines()]
        trained = [line["step"] for line in lines if "loss" in line and line["step"] > 60]
        assert trained == list(range(61, 71)), "every step is trained where a run is extended"
    assert unlike(weights(place, "away"), weights(place, "stays")) == 0


def test_the_first_site_is_killed_and_takes_the_newest_weights_of_the_others(place: Place) -> None:
    held = place.path / "held"
    with ExitStack() as stack:
        name = stack.enter_context(job(place, "first.yaml", steps=60, sync="every: 6", grace_s=5.0))
        north, south, again = (stack.enter_context(Crowd()) for _ in range(3))
        first = ("--site", "north", "--run-dir", "first")
        [killed] = start(north, place, 1, name, *first, PAUSE_S="0.02")
        [stays] = start(
            south, place, 1, name, "--site", "south", "--run-dir", "other", PAUSE_S="0.02", HELD_BY=str(held)
        )
        wait_for(place, "first", 20, killed)
        killed.signal(signal.SIGKILL)
        killed.wait()
        wait_until(lambda: "this site trains on alone" in stays.output, stays)
        held.touch()
        [back] = start(again, place, 1, name, *first, "--resume", PAUSE_S="0.02")
        wait_until(lambda: "INEXACT" in back.output, back)
        held.unlink()
        ended([back])
        ended([stays])
    merged = [line["outer_step"] for line in outer_steps(place, "other")]
    assert merged[0] == 1
    assert merged[-1] == 10
    assert len(merged) < 10, "some were not merged"
    assert unlike(weights(place, "first"), weights(place, "other")) == 0


def test_what_cannot_be_is_refused_in_one_message(place: Place) -> None:
    with job(place, "refused.yaml", steps=4, sync="every: 2") as name:
        for words, arguments in (
            ("say which of the sites this is: --site north or --site south", ()),
            ("there is no site 'east' in shares, which has north, south", ("--site", "east")),
        ):
            statuses, said = launched(
                1, ("-m", "heterodyne", "train", name, *arguments), folder=place.path, variables=place.environment
            )
            assert statuses == [2], said
            assert words in said
            assert "Traceback" not in said
