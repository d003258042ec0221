"""A run that was killed or stopped and then resumed has the losses of one that was left alone."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.frontend import Captured, trace
from heterodyne.job import Job
from heterodyne.plan import Layout, MicroBatches, Pipeline, Plan, Region, Stage
from heterodyne.plan.lower import lower
from heterodyne.run_directory import RunDirectory
from heterodyne.runtime.checkpoint.export import WEIGHTS
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.data.corpus import text_sources
from heterodyne.runtime.data.text import GlobalBatch, TextData
from heterodyne.runtime.data.tokens import open_tokens
from heterodyne.runtime.engine import Outcome
from heterodyne.runtime.records.progress import SilentReporter
from heterodyne.runtime.trainer import Trainer
from heterodyne.runtime.worker import StepResult, Worker
from multiprocess.pool import Pool, RemoteError, World
from pure.build import cluster

STEPS, BATCH, LENGTH = 8, 8, 8

JOB = Job.model_validate(
    {
        "model": {"factory": "tiny:build"},
        "data": {"sequence_length": LENGTH, "validation_fraction": 0.1},
        "training": {"steps": STEPS, "global_batch_size": BATCH, "validate_every": 4, "validation_samples": 10},
        "optimizer": {"lr": 0.03, "warmup_steps": 2},
        "checkpoint": {"every": 3},
        "metrics": {"tensorboard": False},
    }
)


class Tiny(nn.Module):
    """Byte ids and labels [B, T] -> the mean loss; with dropout and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.mix(self.embed(input_ids))), 0.1, self.training)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@cache
def captured() -> Captured:
    """`Tiny` as the runtime is told of it."""
    tokens = torch.zeros(4, LENGTH, dtype=torch.int64)
    return trace(Tiny().train(), {"input_ids": tokens, "labels": tokens})


def plan_for(shares: Sequence[int | None]) -> Plan:
    """Samples of each rank, in micro-batches of two; None for an idle one."""
    machines = cluster(len(shares))
    region = Region(layout=Layout(shares=(1,)))
    return Plan(
        model=captured().graph.fingerprint,
        cluster=machines.fingerprint,
        global_batch_size=BATCH,
        bucket_bytes=200,
        pipelines=tuple(
            Pipeline(
                micro_batches=MicroBatches.of_samples(share, 2),
                stages=(Stage(ops=(0, len(captured().graph.ops)), devices=(device.id,), regions=(region,)),),
            )
            for device, share in zip(machines.devices, shares, strict=True)
            if share is not None
        ),
        idle=tuple(d.id for d, share in zip(machines.devices, shares, strict=True) if share is None),
    )


@dataclass(frozen=True)
class Strike:
    """What happens to one rank in one step: a signal at its begin."""

    rank: int
    step: int
    number: signal.Signals


class Heard(SilentReporter):
    """Writes down what is said for people."""

    def __init__(self, path: Path) -> None:
        super().__init__(STEPS)
        self._path = path

    def say(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{text}\n")


class Struck(Worker):
    strike: Strike | None = None

    def step(self, batch: GlobalBatch, step: int | None = None) -> StepResult:  # type: ignore[override]
        if self.strike and self.strike.rank == self.rank and self.strike.step == self.steps_done:
            os.kill(os.getpid(), self.strike.number)
        return super().step(batch, step)


def train(world: World, run: Path, shares: Sequence[int | None], resume: bool, strike: Strike | None) -> Outcome:
    """One run, as every rank sees it."""
    machines, plan = cluster(len(shares)), plan_for(shares)
    torch.manual_seed(JOB.training.seed)
    device = torch.device("cpu")
    with Communicator(rank=world.rank, world_size=world.world_size, device=device) as communicator:
        worker = Struck(
            Tiny(),
            lowered=lower(plan, captured().graph, machines),
            communicator=communicator,
            loss_count=captured().loss_count,
            optimizer=JOB.optimizer,
            total_steps=STEPS,
            seed=JOB.training.seed,
        )
        worker.strike = strike
        trainer = Trainer(
            worker=worker,
            data=TextData(
                file=open_tokens(text_sources(str(run.parent / "text")), run.parent / "cache", say=lambda _: None),
                sequence_length=LENGTH,
                validation_fraction=JOB.data.validation_fraction,
                batch_size=BATCH,
                seed=JOB.training.seed,
            ),
            job=JOB,
            plan=plan,
            run=RunDirectory(run),
            agreement=Agreement.of_all(),
            reporter=Heard(run / "said"),
        )
        if resume:
            trainer.resume()
        outcome = trainer.train()
        trainer.export()
        worker.close()
    return outcome


def losses(run: Path) -> dict[tuple[int, str], float]:
    """Every loss by step and kind; a step that stood there twice would be an error of its own."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [
        ((line["step"], kind), line[kind]) for line in lines for kind in ("loss", "validation_loss") if kind in line
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the text, for any number of runs beside it."""
    place = tmp_path_factory.mktemp("runs")
    (place / "text").write_text("".join(f"{number * number} is the square of {number}\n" for number in range(300)))
    return place


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, place: Path) -> dict[tuple[int, str], float]:
    (place / "undisturbed").mkdir()
    pool.run(2, train, place / "undisturbed", (5, 3), False, None)
    return losses(place / "undisturbed")


@pytest.fixture
def run(place: Path, request: pytest.FixtureRequest) -> Path:
    path = place / str(len(list(place.iterdir())))
    path.mkdir()
    return path


def test_the_loss_falls_and_every_step_is_there(undisturbed: dict[tuple[int, str], float]) -> None:
    assert [step for step, kind in undisturbed if kind == "loss"] == list(range(1, STEPS + 1))
    assert undisturbed[8, "validation_loss"] < undisturbed[4, "validation_loss"] < 5.6


@pytest.mark.parametrize(("rank", "step"), [(0, 1), (1, 4), (0, 6), (1, 7)])
def test_killed_and_resumed_losses_are_equal_bit_for_bit(
    pool: Pool, run: Path, undisturbed: dict[tuple[int, str], float], rank: int, step: int
) -> None:
    with pytest.raises(RemoteError, match="exit status -9"):
        pool.run(2, train, run, (5, 3), False, Strike(rank, step, signal.SIGKILL))
    pool.run(2, train, run, (5, 3), True, None)
    assert losses(run) == undisturbed


@pytest.mark.parametrize("rank", [0, 1])
def test_asked_on_one_rank_all_stop_after_the_same_step_and_go_on_bit_for_bit(
    pool: Pool, run: Path, undisturbed: dict[tuple[int, str], float], rank: int
) -> None:
    outcomes = pool.run(2, train, run, (5, 3), False, Strike(rank, 3, signal.SIGTERM))
    assert all(outcome.interrupted for outcome in outcomes)
    (stopped,) = {outcome.steps for outcome in outcomes}
    assert 4 <= stopped <= 5, "the step in which it was asked, or the next"
    assert re.search(rf"rank {rank} got SIGTERM \(pid \d+\): stopping after step {stopped}", (run / "said").read_text())
    assert (run / "checkpoint" / f"step-{stopped}").is_dir()
    outcomes = pool.run(2, train, run, (5, 3), True, None)
    assert not any(outcome.interrupted for outcome in outcomes)
    assert losses(run) == undisturbed


@pytest.mark.parametrize("shares", [(8,), (3, 5), (0, 8), (None, 8), (2, 1, 5), (8, None, 0)], ids=str)
def test_under_other_shares_and_numbers_of_ranks_they_are_equal_but_for_rounding(
    pool: Pool, run: Path, undisturbed: dict[tuple[int, str], float], shares: tuple[int | None, ...]
) -> None:
    pool.run(2, train, run, (5, 3), False, Strike(0, 3, signal.SIGTERM))
    outcomes: list[Any] = pool.run(len(shares), train, run, shares, True, None)
    assert {outcome.steps for outcome in outcomes} == {STEPS}
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)
    exported, wanted = (load_file(path / "model" / WEIGHTS) for path in (run, run.parent / "undisturbed"))
    for name, tensor in wanted.items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-4, atol=1e-5)
