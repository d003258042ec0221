"""What is known of a run before its first step and after its last one, as files of its directory."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict

import torch

from heterodyne.api.printing import candidate_lines
from heterodyne.api.session import Session
from heterodyne.api.settings import Prepared
from heterodyne.cluster.written import cluster_to_json
from heterodyne.errors import HeterodyneError
from heterodyne.graph.ir import ModelGraph
from heterodyne.run_directory import RunDirectory
from heterodyne.runtime.engine import Outcome
from heterodyne.search.explain import result_of
from heterodyne.text_files import write_text

__all__ = ["write_plan_files", "write_summary"]


def write_plan_files(run: RunDirectory, session: Session, prepared: Prepared) -> None:
    """Cluster, candidates, the simulated timeline, plan and profile. On rank 0. Raises HeterodyneError if they cannot be written."""
    planned = prepared.planned
    assert planned is not None, "rank 0 is the one that searched"
    try:
        write_text(run.cluster, cluster_to_json(session.cluster))
        write_text(run.candidates, json.dumps(candidate_lines(result_of(planned)), indent=1) + "\n")
        planned.simulation.timeline([device.id for device in session.cluster.devices]).save(run.timeline("simulated"))
        prepared.lowered.plan.save(run.plan)
        prepared.profile.save(run.profile)  # last: a run that has it has the others
    except OSError as error:
        raise HeterodyneError(
            f"{error.filename or run.path} cannot be written ({error.strerror}); make room or make the run directory writable"
        ) from error


def write_summary(run: RunDirectory, graph: ModelGraph, outcome: Outcome) -> None:
    """Write how a run ended, with versions and the machine. On rank 0."""
    summary = {
        "model": graph.name,
        "parameters": graph.parameter_count,
        **asdict(outcome),
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        },
    }
    write_text(run.summary, json.dumps(summary, indent=1) + "\n")
