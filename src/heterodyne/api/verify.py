"""``heterodyne verify``: law 1 for one job and one plan."""

from __future__ import annotations

from pathlib import Path

from heterodyne.api.job_model import capture_job, job_worker, open_data, settings_of
from heterodyne.api.preparation import prepare
from heterodyne.api.printing import show, show_planned
from heterodyne.api.session import open_session
from heterodyne.job import Job
from heterodyne.plan.plan import Plan
from heterodyne.report.tables import verify_rows
from heterodyne.runtime.exact.verify import compare, one_device_gradients
from heterodyne.runtime.weights.boxed import assembled, kept_pieces

__all__ = ["BAR", "verify_job"]

BAR = 1e-5


def verify_job(job: Job, base: Path, *, cluster_file: Path | None, given: Plan | None) -> int:
    """One step under the plan and one on a single device, same weights, same batch, in fp32; 1 if they differ by more than BAR."""
    if job.training.precision != "fp32":
        job = job.model_copy(update={"training": job.training.model_copy(update={"precision": "fp32"})})
    with open_session(cluster_file) as session:
        data = open_data(session, job, base)
        source = capture_job(session, job, base, data)
        captured = source.captured
        if given is not None:
            given = given.model_copy(update={"precision": "fp32"})
        prepared = prepare(session, captured, source.whole, settings_of(job), given=given)
        if prepared.planned is not None:
            show_planned(prepared.planned)
        first = session.rank == 0
        worker = job_worker(session, job, base, prepared)
        batch = data.batch(0)
        session.say("one step under the plan ...")
        loss, gradients = worker.gradients(batch)
        with session.announced("the same on one device"):
            # Each piece of a gradient from the rank that answers for it; a rank may hold but a part of the model, or none.
            kept = kept_pieces(gradients, worker.ownership, session.rank)
            gathered = session.communicator.all_gather_object(kept)
            status = 0
            if first:
                reference = one_device_gradients(
                    source.whole.build(session.device),  # the same weights, for they are made from the same seed
                    batch,
                    graph=captured.graph,
                    placement=worker.placement,
                    device=session.device,
                    precision="fp32",
                    loss_count=captured.loss_count,
                    seed=job.training.seed,
                )
                compared = compare(loss, assembled(gathered, worker.ownership.shapes), *reference)
                show(verify_rows(compared.loss, dict(compared.gradients), bar=BAR))
                status = 0 if compared.largest <= BAR else 1
            return session.communicator.broadcast_object(status, 0)
