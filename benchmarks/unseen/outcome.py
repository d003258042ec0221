"""What becomes of a family under each kind of plan, in processes of its own: exact, refused, or neither."""

from __future__ import annotations

import multiprocessing
import re
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from heterodyne.api.stage_cutting import StageCutter
from heterodyne.errors import HeterodyneError, NoGraphError
from heterodyne.frontend import Captured, CapturedModel, opaque, read_count, trace
from heterodyne.model_output import loss_of
from heterodyne.plan.lower import lower
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.worker import Worker
from unseen.family import Family
from unseen.plans import SAMPLES, cluster_of, plan_of

__all__ = ["BAR", "Outcome", "outcomes_of", "warm_up"]

BAR = 1e-5
STEPS, RATE, MOMENTUM = 2, 0.05, 0.9
ROUNDING = 4.0
"""Where plain PyTorch itself is further off in fp32, as in sums that cancel out, so many times what it is off is exact as well."""
NOTHING = 1e-5
"""A tensor whose norm is below this part of all together is zero up to rounding: its error is one of all together."""
CAPTURE_S, PLAN_S, GRACE_S = 240.0, 120.0, 2.0
FORK = multiprocessing.get_context("fork")
LINE = re.compile(r"\.py:\d+")

State = dict[str, dict[str, Tensor]]
"""Under ``gradients`` (of the first step), ``momentum``, ``weights`` (and buffers): tensors by name; under ``losses``: by number."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``what``: exact, refused, wrong, crashed, hung, late (a refusal after the first step began) or nowhere (one without a line)."""

    kind: str
    what: str
    told: str = ""
    error: float = 0.0

    @classmethod
    def refused(cls, kind: str, told: str) -> Outcome:
        return cls(kind=kind, what="refused" if LINE.search(told) else "nowhere", told=told)


def outcomes_of(family: Family, kinds: Sequence[str]) -> list[Outcome]:
    """In another process, so that nothing is left of it; a crash or a hang is an outcome too."""
    with tempfile.TemporaryDirectory(prefix="families-") as folder:
        known = Path(folder) / "reference.pt"
        told = _in_process(reference, (family, known), CAPTURE_S)
        if not known.exists():
            raise AssertionError(f"{family.name} does not train in plain PyTorch: {told[-1]}")
        answers = _in_process(under_plans, (family, tuple(kinds), known), CAPTURE_S + len(kinds) * PLAN_S)
    found = {outcome.kind: outcome for outcome in answers if isinstance(outcome, Outcome)}
    lost = next((answer for answer in answers if isinstance(answer, str)), "no answer in time")
    what = "hung" if lost == "no answer in time" else "crashed"
    return [found.get(kind) or Outcome(kind=kind, what=what, told=lost) for kind in kinds]


def warm_up(family: Family) -> None:
    """Import here what every process would import for itself: what capture needs, and the code of the family."""
    trace(nn.Sequential(nn.Linear(2, 2), nn.Flatten(0), Mean()), [torch.ones(2, 2)])
    family.module()


class Mean(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.mean()


def reference(family: Family, path: Path, answer: connection.Connection) -> None:
    """Plain PyTorch: the module, ``backward``, SGD; and how far from that it is itself in double precision."""
    known = _alone(family, torch.float32)
    exact: State = {}
    with suppress(RuntimeError):  # not every model runs in double precision
        exact = _alone(family, torch.float64)
    rounding = {
        part: {name: _norm(tensor.double() - exact[part][name].double()) for name, tensor in known[part].items()}
        for part in exact
    }
    torch.save((known, rounding), path)
    answer.send("done")


def _alone(family: Family, dtype: torch.dtype) -> State:
    module = family.module().to(dtype)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=RATE, momentum=MOMENTUM)
    state: State = {"losses": {}}
    for step, batch in enumerate(family.batches(SAMPLES, STEPS)):
        optimizer.zero_grad()
        loss = loss_of(module(**{n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()}))
        loss.backward()
        state["losses"][str(step)] = loss.detach()
        if step == 0:
            state["gradients"] = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
    state["weights"] = {n: t.clone() for n, t in module.state_dict().items() if isinstance(t, Tensor)}
    named = {n: optimizer.state.get(p, {}).get("momentum_buffer") for n, p in module.named_parameters()}
    state["momentum"] = {n: t for n, t in named.items() if t is not None}
    return state


def under_plans(family: Family, kinds: Sequence[str], known: Path, answer: connection.Connection) -> None:
    """Capture once, then one plan after the other."""
    try:
        captured = _captured(family)
    except HeterodyneError as error:
        for kind in kinds:
            answer.send(Outcome.refused(kind, str(error)))
        return
    for kind in kinds:
        answer.send(_under(family, captured, kind, known))


def _captured(family: Family) -> CapturedModel:
    """The graph of it, or, where torch.export gives none and it is known what the loss divides by, the module as it is."""
    module, batch = family.module(), family.batches(SAMPLES, 1)[0]
    try:
        return trace(module, batch, name=family.name)
    except NoGraphError as error:
        if family.count is None:
            raise
        count = read_count(family.count)
        return opaque(
            module,
            batch,
            reason=error.reason,
            loss=count.loss,
            count=count,
            random=False,
            batch_norm=False,
            name=family.name,
        )


def _under(family: Family, captured: CapturedModel, kind: str, known: Path) -> Outcome:
    world = len(cluster_of(kind).devices)
    with tempfile.TemporaryDirectory(prefix="families-") as folder:
        ranks = [_start(train, (family, captured, kind, rank, Path(folder) / "store", known)) for rank in range(world)]
        answers = _answers(ranks, PLAN_S)
    if not answers:
        return Outcome(kind=kind, what="hung", told=f"no answer within {PLAN_S:g} s")
    # The first to fail tells why; what the others say follows from it.
    failed = next((a for a in answers if isinstance(a, Outcome) and a.what != "exact"), None)
    if failed is not None:
        return failed
    lost = next((a for a in answers if isinstance(a, str)), None)
    if lost is not None or len(answers) < world:
        return Outcome(kind=kind, what="crashed" if lost else "hung", told=lost or "a rank never ended")
    return max(answers, key=lambda outcome: outcome.error)


def train(
    family: Family,
    captured: CapturedModel,
    kind: str,
    rank: int,
    store: Path,
    known: Path,
    answer: connection.Connection,
) -> None:
    """What one rank does."""
    cluster = cluster_of(kind)
    world = len(cluster.devices)
    began = False
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
        plan = plan_of(kind, captured.graph)
        module = family.module()
        worker = Worker(
            module,
            lowered=lower(plan, captured.graph, cluster, clip=False),
            communicator=Communicator(rank=rank, world_size=world, device=torch.device("cpu")),
            loss_count=captured.loss_count,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM),
            total_steps=STEPS,
            clip_grad_norm=0.0,
            stage_programs=StageCutter(captured, module) if isinstance(captured, Captured) else None,
        )
        began = True
        state: State = {"losses": {}}
        for step, batch in enumerate(family.batches(SAMPLES, STEPS)):
            state["losses"][str(step)] = torch.tensor(worker.step(batch).loss)
            whole = worker.state.state_dict()
            momentum = {
                n: s["momentum_buffer"].clone() for n, s in whole["optimizer"].items() if "momentum_buffer" in s
            }
            state["gradients" if step == 0 else "momentum"] = momentum
        state["weights"] = {n: t.clone() for n, t in whole["model"].items() if isinstance(t, Tensor)}
        answer.send(_compared(kind, state, *torch.load(known)))
        dist.barrier()
    except HeterodyneError as error:
        refused = Outcome.refused(kind, str(error))
        answer.send(Outcome(kind=kind, what="late", told=refused.told) if began else refused)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is an outcome
        place = traceback.extract_tb(error.__traceback__)[-4:]
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(place))
        answer.send(Outcome(kind=kind, what="crashed", told=f"{type(error).__name__}: {str(error)[:500]} ({where})"))


def _compared(kind: str, found: State, known: State, rounding: dict[str, dict[str, float]]) -> Outcome:
    worst, where = 0.0, ""
    for part, wanted in known.items():
        whole = sum(_norm(tensor) ** 2 for tensor in wanted.values()) ** 0.5
        # Momentum is a sum of gradients that may cancel out: it is as exact as they are.
        summed = known["gradients"] if part == "momentum" else {}
        for name in wanted.keys() | (found[part].keys() if part != "weights" else set()):
            beside = _norm(summed[name]) if name in summed else 0.0
            beside += ROUNDING / BAR * rounding.get(part, {}).get(name, 0.0)
            error = _error(found[part].get(name), wanted.get(name), beside, whole)
            if not error <= worst:
                worst, where = error, f"{part} of {name}"
    return Outcome(kind=kind, what="exact" if worst <= BAR else "wrong", told=f"{where} {worst:.1e}", error=worst)


def _error(found: Tensor | None, wanted: Tensor | None, beside: float, whole: float) -> float:
    """Relative, by norms. What only one side has is all wrong, unless it is zero."""
    if found is None or wanted is None:
        alone = found if wanted is None else wanted
        return 0.0 if alone is None or _norm(alone) <= NOTHING * whole else 1.0
    norm = _norm(wanted) + beside
    scale = norm if norm > NOTHING * whole else whole
    difference = _norm(found.double() - wanted.double())
    return difference / scale if scale else difference


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()).item())


Running = tuple[Any, connection.Connection]


def _start(function: Any, arguments: tuple[Any, ...]) -> Running:
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_quietly, args=(function, arguments, there))
    process.start()
    there.close()
    return process, here


def _quietly(function: Any, arguments: tuple[Any, ...], answer: connection.Connection) -> None:
    try:
        function(*arguments, answer)
    except Exception:  # noqa: BLE001  # whatever it is, it is an outcome
        answer.send("".join(traceback.format_exc().splitlines(keepends=True)[-12:]))


def _answers(running: Sequence[Running], seconds: float) -> list[Any]:
    """What the processes send until they end, in the order in which it comes; after a failure the others have a moment."""
    pipes = {pipe: process for process, pipe in running}
    found, deadline = [], time.monotonic() + seconds
    while pipes:
        ready = connection.wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            try:
                found.append(pipe.recv())  # type: ignore[union-attr]  # a list of Connection gives Connection
                if isinstance(found[-1], Outcome) and found[-1].what not in ("exact", "wrong") and len(running) > 1:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            except EOFError:
                process = pipes.pop(pipe)  # type: ignore[call-overload]
                process.join()
                if process.exitcode:
                    found.append(f"the process ended with exit status {process.exitcode}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
    for process, pipe in running:
        process.kill()
        process.join()
        with suppress(OSError):
            pipe.close()
    return found


def _in_process(function: Any, arguments: tuple[Any, ...], seconds: float) -> list[Any]:
    return _answers([_start(function, arguments)], seconds) or ["no answer in time"]
