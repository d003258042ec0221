"""``heterodyne measure``."""

from __future__ import annotations

from pathlib import Path

from heterodyne.api.job_model import capture_job, open_data, settings_of
from heterodyne.api.measuring import measure_everywhere
from heterodyne.api.printing import show
from heterodyne.api.session import open_session
from heterodyne.job import Job
from heterodyne.report.tables import profile_rows

__all__ = ["measure_job"]


def measure_job(job: Job, base: Path, *, cluster_file: Path | None, out: Path | None, fresh: bool) -> int:
    """Measure the job's model on the devices of the session, print the profile, and write it to ``out``."""
    with open_session(cluster_file, deterministic=job.training.deterministic, tf32=job.training.tf32) as session:
        model = capture_job(session, job, base, open_data(session, job, base))
        profile = measure_everywhere(session, model.captured, model.whole, settings_of(job, session), fresh=fresh)
        if session.rank == 0:
            show(*profile_rows(profile, model.captured.graph.name))
            if out is not None:
                profile.save(out)
                session.say(f"wrote {out}")
    return 0
