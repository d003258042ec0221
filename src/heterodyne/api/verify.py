"""``heterodyne verify``: law 1 for one job and one plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

from heterodyne.api.job_model import JobModel, capture_job, job_worker, open_data, settings_of
from heterodyne.api.preparation import prepare
from heterodyne.api.printing import show, show_result
from heterodyne.api.session import Session, open_session
from heterodyne.job import Job
from heterodyne.plan.order import is_asynchronous
from heterodyne.plan.placement import Placement
from heterodyne.plan.plan import Plan
from heterodyne.plan.schedules.asynchronous import INEXACT
from heterodyne.report.tables import Verified, verified_rows, verify_rows
from heterodyne.runtime.data.source import DataSource
from heterodyne.runtime.exact.small_batch import without_counts
from heterodyne.runtime.exact.verify import BAR, compare, one_device_gradients
from heterodyne.runtime.slices import GlobalBatchLike, union
from heterodyne.runtime.weights.pieces import box_pieces, joined_by_name
from heterodyne.runtime.worker import Worker
from heterodyne.search.explain import result_of

__all__ = ["verify_job"]


def verify_job(job: Job, base: Path, *, cluster_file: Path | None, given: Plan | None, batches: int = 3) -> int:
    """Steps under the plan and on a single device, same weights, same batches, in fp32; 1 if they differ by more than BAR."""
    job = job.model_copy(
        update={
            "training": job.training.model_copy(update={"precision": "fp32"}),
            "parallelism": job.parallelism.model_copy(
                update={"check_s": 0.0}
            ),  # what is compared here is the plan itself
        }
    )
    with open_session(cluster_file, deterministic=job.training.deterministic, tf32=job.training.tf32) as session:
        data = open_data(session, job, base)
        source = capture_job(session, job, base, data)
        if given is not None:
            given = given.model_copy(update={"precision": "fp32"})
        prepared = prepare(session, source.captured, source.whole, settings_of(job, session), given=given)
        if prepared.planned is not None:
            show_result(result_of(prepared.planned), session.cluster)
        worker = job_worker(session, job, base, prepared)
        if is_asynchronous(worker.plan):
            session.say(
                f"{INEXACT}. What is verified here are gradients of steps that are flushed, at the same weights"
            )
        with session.announced(f"{batches} batches under the plan and on one device"):
            # The same weights as the worker's, for they are made from the same seed.
            module = source.whole.build(session.device) if session.rank == 0 else None
            found = [
                verified
                for number, (words, batch) in enumerate(
                    _batches(session, source, data, worker.placement, module, batches)
                )
                if (verified := _verified(session, source, worker, module, batch, words, number, job.training.seed))
            ]
        if session.rank == 0:
            worst = max(found, key=lambda each: each.largest)
            show(verified_rows(found, bar=BAR), verify_rows(worst.loss, worst.gradients, bar=BAR))
        return session.communicator.broadcast_object(int(not all(each.largest <= BAR for each in found)), 0)


def _batches(
    session: Session, source: JobModel, data: DataSource, placement: Placement, module: nn.Module | None, count: int
) -> Iterator[tuple[str, GlobalBatchLike]]:
    """Those of the first steps; the last one, if there are several, with samples of one device that count nothing. Collective."""
    for step in range(max(1, count - 1)):
        yield f"step {step}", data.batch(step)
    if count == 1:
        return
    of_step = data.batch(count - 1)
    samples = _of_one_device(placement)

    def made() -> dict[str, Tensor] | None:
        assert module is not None
        graph = source.captured.graph
        whole = union(of_step, [(0, of_step.size)], graph)
        return without_counts(whole, graph, source.captured.loss_count, dict(module.named_buffers()), samples)

    batch = session.agreement.on_rank0(made) if samples else None
    if batch is None:
        yield f"step {count - 1}", of_step
    else:
        yield f"step {count - 1}, but samples {samples.start} to {samples.stop - 1} count nothing", batch


def _of_one_device(placement: Placement) -> range:
    """A run of samples of the device that has fewest on a last stage, but never all of them; empty if there is but one."""
    spans = [[span for span in place.spans() if span[1]] for place in placement.places if place.last and place.answers]
    fewest = min((own for own in spans if own), key=lambda own: sum(count for _, count in own))
    total = sum(count for own in spans for _, count in own)
    first, stop = fewest[0][0], fewest[0][0] + fewest[0][1]
    for start, count in fewest[1:]:
        stop = start + count if start == stop else stop
    return range(first, min(stop, first + total - 1))


def _verified(
    session: Session,
    source: JobModel,
    worker: Worker,
    module: nn.Module | None,
    batch: GlobalBatchLike,
    words: str,
    step: int,
    seed: int,
) -> Verified | None:
    """One step of both; on rank 0, None elsewhere. Collective."""
    loss, gradients = worker.gradients(batch, step)
    # Each piece of a gradient from the rank that answers for it; a rank may hold but a part of the model, or none.
    own = {name: box_pieces(name, found.cpu(), worker.ownership, session.rank) for name, found in gradients.items()}
    gathered = session.communicator.all_gather_object({name: of for name, of in own.items() if of is not None})
    if module is None:
        return None
    reference = one_device_gradients(
        module,
        batch,
        graph=source.captured.graph,
        placement=worker.placement,
        device=session.device,
        precision="fp32",
        loss_count=source.captured.loss_count,
        seed=seed,
        step=step,
    )
    compared = compare(loss, joined_by_name(gathered), *reference)
    return Verified(words=words, loss=compared.loss, gradients=dict(compared.gradients))
