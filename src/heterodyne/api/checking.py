"""Before anything is measured: is what will run the model? Once a model, on rank 0, in seconds; every rank gets the verdict."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import heterodyne
from heterodyne.api.compiled import uncompiled
from heterodyne.api.session import Session
from heterodyne.api.settings import Settings
from heterodyne.api.stage_cutting import StageCutter
from heterodyne.errors import DataError, PlanError, VerifyError
from heterodyne.frontend import Captured
from heterodyne.graph.ir import ModelGraph
from heterodyne.json_files import read_json
from heterodyne.measure.cache import default_folder
from heterodyne.measure.host_memory import host_context_bytes
from heterodyne.measure.whole_model import WholeModel
from heterodyne.plan.capabilities import FEATURES, asked_by, uses
from heterodyne.plan.plan import Plan
from heterodyne.runtime.exact.finding import Finding, needs_graph, words_of
from heterodyne.runtime.exact.guard import compare_forms
from heterodyne.runtime.slices import as_source
from heterodyne.text_files import write_text
from heterodyne.units import format_bytes, format_seconds

__all__ = ["Verdict", "check_everywhere", "require_exact"]

_VERSION = 2
_SAMPLES = (5, 3)  # as many as fit
_RUNS = 4  # in one piece, twice, in parts, cut
_PROBE = 512


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a check that did not refuse the model.

    Args:
        line: for people.
        module_only: why no plan may run pieces of the captured graph; "" if they may.
        kept: it holds for this model from now on; False where something was left out.
    """

    line: str
    module_only: str = ""
    kept: bool = True


def check_everywhere(session: Session, captured: Captured, whole: WholeModel, *, budget_s: float) -> Verdict:
    """Compare the model in unequal parts, and its graph cut in two, with one plain call; or find that it was done before. Collective.

    Raises VerifyError, on every rank, if the parts do not add up to the whole.
    """
    path = _path(captured, session.device)

    def decide() -> Verdict:
        known = _read(path)
        if known is not None:
            return known
        verdict = _check(session, captured, whole, budget_s)
        if verdict.kept:
            _write(path, verdict)
        return verdict

    with session.phase("checking the captured model"):
        verdict = session.agreement.on_rank0(decide)
        session.give_back()
    session.say(verdict.line)
    return verdict


def require_exact(settings: Settings, graph: ModelGraph, given: Plan | None) -> None:
    """Raise PlanError where what is asked for does not go with the optimizer, VerifyError where it is refused by what the check has found.

    `lower` reports the other faults of a plan; the search reports why a strategy has no plan.
    """
    strategy = settings.parallelism.strategy
    if given is not None:
        asked, features = "the plan", tuple(use.feature for use in uses(given))
    else:
        asked = "what the model is marked with" if strategy == "auto" else f"the strategy {strategy!r}"
        features = asked_by(strategy, graph)
    trait = settings.able(graph).refusing(*features)
    if trait is not None and trait.of == "optimizer":
        raise settings.reach.refusal(asked)
    if trait is not None and trait.of == "job":
        names = ", ".join(FEATURES[feature].name for feature in features if feature in trait.refuses)
        raise PlanError(
            f"{asked} does not go with parallelism.async: predicted, for it has {names}: leave one of them out"
        )
    if trait is not None and trait.of == "check":
        raise VerifyError(f"{asked} cuts the model. {settings.module_only}")


def _check(session: Session, captured: Captured, whole: WholeModel, budget_s: float) -> Verdict:
    started_s = time.perf_counter()
    graph, device = captured.graph, session.device
    samples, why = _affordable(session, graph, budget_s)
    if whole.weightless:
        why = "it has no weights yet"
    if why:
        return _left_out(why)
    try:
        module = uncompiled(whole.build(device))
    except Exception as error:  # noqa: BLE001  # a model need not be one that can be copied
        return _left_out(f"it cannot be copied ({type(error).__name__}: {error})")
    try:
        with torch.random.fork_rng(devices=[]):
            findings = compare_forms(
                module,
                as_source(whole.example, graph),
                graph=graph,
                loss_count=captured.loss_count,
                stage_programs=StageCutter(captured, module),
                device=device,
                samples=samples,
                budget_s=budget_s,
            )
    except torch.OutOfMemoryError:
        return _left_out(f"{session.cluster.devices[0].id} has too little memory for it")
    except (DataError, TimeoutError) as error:
        return _left_out(str(error))
    if not findings:
        return _left_out("its loss or a gradient is not a number on the example")
    wrong = {finding.form: words_of(finding, graph) for finding in findings if not finding.agrees}
    if "parts" in wrong or (wrong and needs_graph(graph)):
        raise VerifyError(" ".join(wrong.values()))
    return _verdict(graph, findings, wrong.get("cut", ""), time.perf_counter() - started_s)


def _affordable(session: Session, graph: ModelGraph, budget_s: float) -> tuple[int, str]:
    """Return how many samples to take; why none, where these bytes or seconds are not there."""
    device = session.cluster.devices[0]
    least = _SAMPLES[-1]
    # A copy of the model; gradients of one plain call, of what it is compared with, and those that are being made.
    needed = graph.parameter_bytes + 3 * graph.trainable_bytes + int(graph.bytes_saved()(least))
    # The model itself may be on the host alone, and there it is in what the process occupies already.
    needed += host_context_bytes() if session.device.type == "cpu" else graph.parameter_bytes
    if needed > device.memory_bytes:
        return 0, f"it takes {format_bytes(needed)}, and {device.id} has {format_bytes(device.memory_bytes)}"
    rate = _flops_per_s(session.device)
    seconds = {n: _RUNS * (graph.flops_forward()(n) + graph.flops_backward()(n)) / rate for n in _SAMPLES}
    fitting = [n for n in _SAMPLES if seconds[n] <= budget_s]
    if not fitting:
        return 0, f"it takes {format_seconds(seconds[least])} at least, and there are {format_seconds(budget_s)}"
    return fitting[0], ""


def _flops_per_s(device: torch.device) -> float:
    """Return what the device reaches in a multiplication of matrices: more than any model does, so times are underestimated."""
    matrix = torch.ones(_PROBE, _PROBE, device=device)
    taken = []
    for _ in range(3):
        started_s = time.perf_counter()
        torch.mm(matrix, matrix)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - started_s)
    return 2.0 * _PROBE**3 / max(min(taken), 1e-9)


def _left_out(why: str) -> Verdict:
    line = f"the model was not compared with itself in parts: {why}. 'heterodyne verify' compares steps of a job"
    return Verdict(line=line, kept=False)


def _verdict(graph: ModelGraph, findings: tuple[Finding, ...], cut: str, seconds: float) -> Verdict:
    agreeing = [finding for finding in findings if finding.agrees]
    words = {"parts": "its graph" if needs_graph(graph) else "the module", "cut": "its graph cut in two"}
    forms = " and ".join(words[finding.form] for finding in agreeing)
    line = (
        f"checked in {format_seconds(seconds)}: fed {' + '.join(map(str, findings[0].parts))} samples, {forms} "
        f"{'give' if len(agreeing) > 1 else 'gives'} the loss and {len(findings[0].errors)} gradients of one plain call "
        f"(largest relative error {max(finding.largest for finding in agreeing):.0e})"
    )
    if cut:
        line += f". Only plans that run the module as it is are offered. {cut}"
    return Verdict(line=line, module_only=cut)


def _path(captured: Captured, device: torch.device) -> Path:
    """Return where the verdict is kept, under all that decides it but for the numbers in weights and data."""
    content = [
        _VERSION,
        captured.graph.fingerprint,
        captured.code,
        torch.__version__,
        heterodyne.__version__,
        device.type,
    ]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    return default_folder(os.environ) / "checks" / f"{key}.json"


def _read(path: Path) -> Verdict | None:
    """None for a file that is not there or that is none of ours: then it is checked again."""
    try:
        found = Verdict(**read_json(path))
    except (OSError, ValueError, TypeError):
        return None
    return replace(found, line=f"{found.line}, as found before")


def _write(path: Path, verdict: Verdict) -> None:
    with suppress(OSError):  # it will be checked again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(asdict(verdict)))
