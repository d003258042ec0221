"""``heterodyne plan``."""

from __future__ import annotations

import sys
from pathlib import Path

from heterodyne.api.job_model import capture_job, open_data, settings_of
from heterodyne.api.preparation import prepare
from heterodyne.api.printing import result_json, show_result
from heterodyne.api.session import open_session
from heterodyne.cluster.profile import Profile
from heterodyne.job import Job
from heterodyne.search.explain import result_of

__all__ = ["plan_job"]


def plan_job(
    job: Job, base: Path, *, cluster_file: Path | None, profile: Profile | None, out: Path, as_json: bool = False
) -> int:
    """Plan the job on the devices of the session, print the choice with its reasons, and write it to ``out``."""
    with open_session(cluster_file, deterministic=job.training.deterministic, tf32=job.training.tf32) as session:
        model = capture_job(session, job, base, open_data(session, job, base))
        prepared = prepare(session, model.captured, model.whole, settings_of(job, session), profile=profile)
        if prepared.planned is not None:
            result = result_of(prepared.planned)
            if as_json:
                sys.stdout.write(result_json(result, session.cluster))
            else:
                show_result(result, session.cluster)
            prepared.lowered.plan.save(out)
            session.say(f"wrote {out}")
    return 0
