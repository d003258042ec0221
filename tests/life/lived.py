"""A life in real processes, and beside it plain PyTorch's: what becomes of it."""

from __future__ import annotations

import functools
import gc
import io
import tempfile
from collections.abc import Iterable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import heterodyne as hd
from heterodyne.api.loop.batches import batch_format
from heterodyne.api.loop.model_with_loss import with_loss
from heterodyne.api.session import Session
from heterodyne.errors import NoGraphError
from heterodyne.frontend import opaque, read_count, trace
from heterodyne.graph.ir import ModelGraph
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.comm.communicator import Communicator
from life.draw import SUBJECTS, Life
from life.judge import Outcome, outcome_of
from life.optimizers import OPTIMIZERS
from life.plans import RANKS, plan_for
from life.script import SAMPLES, Plain, Record, played, told
from multiprocess.pool import Pool, RemoteError, World
from multiprocess.work import cluster_of
from pure.build import linear, profile

__all__ = ["lived"]

LIMIT_S = 30.0


def lived(pool: Pool, life: Life, *, limit_s: float = LIMIT_S) -> Outcome:
    """Run it under its plans, and judge."""
    graph = pool.ask(graph_of, life.subject)
    plain, exact = pool.run(1, alone, life)[0]
    ours: list[list[Record]] = []
    with tempfile.TemporaryDirectory(prefix="life-") as folder:
        for number, (kind, _) in enumerate(life.parts):
            try:
                ours.append(pool.run(RANKS.get(kind, 2), together, life, number, graph, folder, timeout_s=limit_s))
            except RemoteError as error:
                hung = "no answer within" in str(error)
                return outcome_of(life, plain, exact, ours, lost="" if hung else str(error), hung=hung)
            if any(record.refused or record.crashed for record in ours[-1]):
                break
    return outcome_of(life, plain, exact, ours)


@functools.cache
def graph_of(name: str) -> ModelGraph:
    """What `hd.distribute` captures of the subject; once a process."""
    subject = SUBJECTS[name]
    model, criterion = subject.made()
    batch = subject.batches(SAMPLES, 0)
    format = batch_format(model, batch, has_loss=criterion is not None)
    named: Any = format.named(batch)
    module = model if criterion is None else with_loss(model, criterion, format, named, withheld=())
    try:
        found = trace(module, named, name=type(model).__name__).graph
    except NoGraphError as error:
        count = read_count(subject.loss_count)
        found = opaque(
            module,
            named,
            reason=error.reason,
            loss=count.loss,
            count=count,
            random=False,
            batch_norm=False,
            name=type(model).__name__,
        ).graph
    _ = found.fingerprint  # kept in the graph
    return found


def alone(world: World, life: Life) -> tuple[list[Record], list[Record]]:
    """The life in plain PyTorch, a record for each of its parts: in single precision, and in double."""
    return _alone(life), _in_double(life)


def _in_double(life: Life) -> list[Record]:
    torch.set_default_dtype(torch.float64)
    try:
        return _alone(life)
    finally:
        torch.set_default_dtype(torch.float32)


def _alone(life: Life) -> list[Record]:
    subject = SUBJECTS[life.subject]
    records: list[Record] = []
    state: Any = None
    for _, lines in life.parts:
        model, criterion = subject.made()
        trainer = Plain(subject, model, criterion, life.optimizer)
        if state is not None:
            trainer.load_state_dict(state)
        records.append(record := Record())
        with told(record):
            played(subject, model, criterion, trainer, lines, record)
            record.end = {"model": _tensors(model), "optimizer": trainer.optimizer_state()}
        state = trainer.state_dict()
    return records


def together(world: World, life: Life, part: int, graph: ModelGraph, folder: str) -> Record:
    """A part of the life on one rank."""
    record = _together(world, life, part, graph, folder)
    if record.refused:
        gc.collect()  # process groups close with what holds them: a rank that waits for this one hears of it, without a watchdog
    return record


def _together(world: World, life: Life, part: int, graph: ModelGraph, folder: str) -> Record:
    subject, (kind, lines) = SUBJECTS[life.subject], life.parts[part]
    model, criterion = subject.made()
    cluster = cluster_of(world.world_size)
    device = torch.device("cpu")
    session = Session(
        cluster=cluster,
        device=device,
        communicator=Communicator(rank=world.rank, world_size=world.world_size, device=device),
        agreement=Agreement.of_all(),
        watchdog=None,
    )
    checkpoints = Path(folder) / "checkpoints"
    record = Record()
    with (
        redirect_stderr(io.StringIO()),
        told(record),
        hd.distribute(
            model,
            subject.batches(SAMPLES, 0),
            loss=hd.LossOptions(criterion, loss_count=subject.loss_count),
            optimizer=functools.partial(_optimizer, life.optimizer),
            plan=hd.PlanOptions(
                plan_for(kind, graph),
                profile=profile(graph, cluster, [linear(1e-3)] * world.world_size, reduce=lambda _: 1e-6),
                check_s=0,
            ),
            session=session,
        ) as trainer,
    ):
        if part:
            trainer.load_checkpoint(checkpoints)
        played(subject, model, criterion, trainer, lines, record)
        record.end = _end(trainer)
        if part + 1 < len(life.parts):
            trainer.save_checkpoint(checkpoints)
    if record.end:
        record.end["model at the end"] = _tensors(model)
    return record


def _optimizer(name: str, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](parameters)


def _end(trainer: hd.Distributed) -> dict[str, dict[str, Tensor]]:
    state = trainer.state_dict()
    return {
        "model": {name: tensor.detach().clone() for name, tensor in state["model"].items()},
        "optimizer": {
            f"{name} {key}": value.detach().clone()
            for name, values in state["optimizer"].items()
            for key, value in values.items()
            if isinstance(value, Tensor) and value.dim()
        },
    }


def _tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
