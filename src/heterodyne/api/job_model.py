"""What a job file says of model, data and training, as things that capture and the runtime can take."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from heterodyne.api.as_it_is import AsItIs
from heterodyne.api.capturing import capture_everywhere
from heterodyne.api.job_data import data_of
from heterodyne.api.optimizer_reach import reach_of_section
from heterodyne.api.precision import resolved
from heterodyne.api.rank_worker import make_worker, stored_everywhere
from heterodyne.api.session import Session
from heterodyne.api.settings import Prepared, Settings
from heterodyne.errors import DataError, HeterodyneError
from heterodyne.frontend import CapturedModel, loss_of
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Job
from heterodyne.measure.cache import default_folder
from heterodyne.measure.whole_model import WholeModel
from heterodyne.models import build, build_count, build_stored
from heterodyne.plan.precision import precision_of
from heterodyne.runtime.data.source import DataSource
from heterodyne.runtime.data.text import require_vocabulary
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.weights.optimizer import require_optimizer_library
from heterodyne.runtime.weights.recorded_build import RecordedBuild
from heterodyne.runtime.worker import Worker

__all__ = ["JobModel", "capture_job", "job_worker", "open_data", "settings_of"]

_EXAMPLE_SAMPLES = 4


@dataclass(frozen=True, kw_only=True)
class JobModel:
    """The model of a job: its capture, and itself in one piece, to be measured."""

    captured: CapturedModel
    whole: WholeModel


def settings_of(job: Job, session: Session) -> Settings:
    """Return what planning needs to know of the job."""
    return Settings(
        global_batch_size=job.training.global_batch_size,
        precision=resolved(session, job.training.precision),
        optimizer=job.optimizer,
        parallelism=job.parallelism,
        reach=reach_of_section(job.optimizer),
        compile=job.training.compile,
        training_steps=job.training.steps,
    )


def example_on_paper(job: Job, base: Path) -> Mapping[str, Tensor]:
    """A few samples of the job without their values: those of its dataset, or tokens. Raises DataError or JobError."""
    if job.data.dataset is None:
        tokens = torch.zeros(_EXAMPLE_SAMPLES, job.data.sequence_length, dtype=torch.int64, device="meta")
        return {"input_ids": tokens, "labels": tokens}
    samples = _example(data_of(job, base, _cache(job, base), say=lambda _: None), 0)
    return {name: tensor.to("meta") for name, tensor in samples.items()}


def _cache(job: Job, base: Path) -> Path:
    return default_folder(os.environ) / "tokens" if job.data.cache is None else base / job.data.cache


def open_data(session: Session, job: Job, base: Path) -> DataSource:
    """The data of the job, on every rank. Raises DataError or JobError."""
    opened: list[DataSource] = []

    def read() -> DataSource:
        if not opened:
            opened.append(data_of(job, base, _cache(job, base), say=session.say))
        return opened[0]

    def read_early(ranks: set[int]) -> None:
        with suppress(HeterodyneError):  # it fails once more where all read, and is told then
            if session.rank in ranks:
                read()

    nodes = [device.node for device in session.cluster.devices]
    with session.phase("reading the data"):
        for ranks in (
            {0},
            {nodes.index(node) for node in nodes},
        ):  # others find the token file that one has written on their disk
            session.agreement.gather_or_raise(partial(read_early, ranks))
        data = session.with_files(read)
    of_ranks = session.agreement.gather_or_raise(lambda: (socket.gethostname(), dict(data.identity)))
    for rank, (host, identity) in enumerate(of_ranks):
        if identity != of_ranks[0][1]:
            raise DataError(
                f"the data of rank {rank} (on {host}) is {identity}, that of rank 0 (on {of_ranks[0][0]}) is {of_ranks[0][1]}: let each "
                "rank find the same files, and the same number of samples"
            )
    return data


def capture_job(session: Session, job: Job, base: Path, data: DataSource, *, example_of: int = 0) -> JobModel:
    """Capture the model of the job without its weights. ``example_of``: the step of whose batch the example is. Raises JobError,
    CaptureError or DataError; HeterodyneError where a library that the job asks for is missing.
    """
    session.with_files(lambda: require_optimizer_library(job.optimizer))
    model = session.with_files(lambda: build(job.model, base=base, device="meta"))
    example = session.together(lambda: _example(data, example_of))

    def whole(device: torch.device) -> nn.Module:
        return build(job.model, base=base, seed=job.training.seed).to(device)

    as_it_is = AsItIs(
        build=whole,
        loss_count=session.with_files(lambda: build_count(job.model, base=base)),
        strategy=job.parallelism.strategy,
        precision=precision_of(resolved(session, job.training.precision), session.cluster.devices[session.rank].kind),
    )
    captured = capture_everywhere(session, model, example, as_it_is)
    vocabulary = _vocabulary(captured.graph)
    if vocabulary is not None:
        _require_vocabulary(session, data, vocabulary, captured.graph.name)
    return JobModel(
        captured=captured,
        whole=WholeModel(
            build=whole,
            inputs=captured.graph.inputs,
            example=example,
            loss=loss_of,
            build_empty=lambda: build(job.model, base=base, device="meta", seed=job.training.seed),
            stored=lambda: build_stored(job.model, base=base),
        ),
    )


def job_worker(session: Session, job: Job, base: Path, prepared: Prepared, recorder: Recorder | None = None) -> Worker:
    """The worker of this rank, with the job's model. Weights that are in files each rank reads, and only what it holds; others rank 0
    makes one after the other, and sends them. Collective.
    """
    seed, sync = job.training.seed, job.training.sync
    found = stored_everywhere(session, lambda: build_stored(job.model, base=base))
    model, stored = found or (session.with_files(lambda: build(job.model, base=base, device="meta", seed=seed)), None)
    makes = session.rank == 0 and stored is None
    recorded = RecordedBuild.of(lambda: build(job.model, base=base, seed=seed)) if makes else None
    if makes and recorded is None:
        model = build(job.model, base=base, seed=seed)
    return make_worker(
        session,
        prepared,
        model,
        optimizer=job.optimizer,
        total_steps=job.schedule_steps,
        seed=seed,
        first_sample=0 if sync is None or sync.site is None else sync.first_of(sync.site),
        clip_grad_norm=job.training.clip_grad_norm,
        recorder=recorder,
        compile=job.training.compile,
        stored=stored,
        weights=None if recorded is None else recorded.weights(),
    )


def _example(data: DataSource, step: int) -> Mapping[str, Tensor]:
    example = data.batch(step).samples(0, min(_EXAMPLE_SAMPLES, data.batch_size))
    if not isinstance(example, Mapping):
        raise DataError(
            f"the samples of data.dataset make a {type(example).__name__} of tensors; let each be a dict, by the names of the "
            "arguments of the model's forward, or give a collator that makes one"
        )
    return example


def _require_vocabulary(session: Session, data: DataSource, vocabulary: int, model: str) -> None:
    def check() -> None:
        needed = data.vocabulary()
        if needed is not None:
            require_vocabulary(vocabulary, model=model, needed=needed)

    session.agreement.only_on_rank0(check)  # a token file is read from end to end for it


def _vocabulary(graph: ModelGraph) -> int | None:
    """Rows of the embedding that reads the token ids, if that is what the model does with them."""
    shapes = {parameter.name: parameter.shape for parameter in graph.parameters}
    for op in graph.ops:
        if op.target.startswith("aten.embedding.") and "input_ids" in op.inputs and op.parameters:
            return shapes[op.parameters[0]][0]
    return None
