"""For one's own training loop: a model in, the same mathematics out, spread over whatever devices there are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Self

from torch import Tensor, nn

from heterodyne.api.loop.arguments import wanted_plan
from heterodyne.api.loop.whole import whole_model
from heterodyne.api.preparation import Prepared, Settings, capture_everywhere, make_worker, prepare
from heterodyne.api.session import Session, open_session
from heterodyne.cluster.profile import Profile
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection, ParallelismSection
from heterodyne.plan.plan import Plan
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.slices import as_source
from heterodyne.runtime.worker import OptimizerFactory, StepResult, Worker
from heterodyne.search.explain import paragraph
from heterodyne.timeline import Timeline

__all__ = ["Distributed", "distribute"]


class Distributed:
    """A model spread over the devices of a session. Made by `distribute`; every rank makes the same calls in the same order."""

    def __init__(
        self, *, session: Session, prepared: Prepared, worker: Worker, recorder: Recorder, closing: ExitStack
    ) -> None:
        self._session = session
        self._prepared = prepared
        self._worker = worker
        self._recorder = recorder
        self._closing = closing

    @property
    def plan(self) -> Plan:
        return self._prepared.plan

    @property
    def graph(self) -> ModelGraph:
        return self._prepared.captured.graph

    @property
    def profile(self) -> Profile:
        return self._prepared.profile

    @property
    def rank(self) -> int:
        return self._session.rank

    @property
    def module(self) -> nn.Module:
        """The user's own module, on this rank's device."""
        return self._worker.module

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """One optimizer step on a global batch, the same on every rank; each works on its share of it.

        Raises DataError for a batch of another size than the plan's, or one in which nothing counts.
        """
        return self._worker.step(batch)

    def evaluate(self, batch: Mapping[str, Tensor]) -> float:
        """The loss of a batch of any size in eval mode, without training on it."""
        return self._worker.evaluate(batch)

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and step; the same on every rank."""
        return self._worker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`. Raises CheckpointError."""
        self._worker.load_state_dict(state)

    def explain(self) -> str:
        """The plan in words, and why it was chosen; on rank 0, empty elsewhere."""
        planned = self._prepared.planned
        return "" if planned is None else paragraph(planned)

    def predicted(self) -> Timeline | None:
        """What should happen in a step; on rank 0, None elsewhere."""
        planned = self._prepared.planned
        return None if planned is None else planned.simulation.timeline(self._device_ids)

    def measured(self) -> Timeline | None:
        """What happened in the latest steps; on rank 0, None elsewhere. Collective."""
        return self._recorder.timeline(self._session.communicator, self._device_ids)

    def close(self) -> None:
        """Take the hooks off the model, and leave the session if it was opened by `distribute`."""
        self._worker.close()
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _device_ids(self) -> list[str]:
        return [device.id for device in self._session.cluster.devices]


def distribute(
    model: nn.Module,
    example_batch: Mapping[str, Tensor],
    *,
    optimizer: OptimizerSection | OptimizerFactory | None = None,
    plan: Plan | Path | str = "auto",
    global_batch_size: int | None = None,
    micro_batch_sizes: tuple[int, ...] = (1, 2, 4, 8),
    precision: Literal["fp32", "bf16"] = "fp32",
    clip_grad_norm: float = 0.0,
    total_steps: int = 1,
    seed: int = 0,
    session: Session | None = None,
    profile: Profile | None = None,
    measure_budget_s: float = 60.0,
    rehearsal_s: float = 30.0,
) -> Distributed:
    """Capture, measure, plan, and make ready to train. Every rank of a torchrun (or of our launcher) calls it.

    Args:
        model: returns its loss from ``model(**batch)``. Rank 0's weights count, the others get them.
        example_batch: a global batch, or any part of one, by input name.
        optimizer: a section as in a job file (AdamW with its defaults if None; its schedule stretches over ``total_steps``), or
            a function from parameters to an optimizer, whose rate stays its own. The planner takes the latter for an AdamW.
        plan: a strategy (``auto``, ``data``, ``pipeline``, ``split``, ``context``, ``equal``, ``fastest``; see a job's section
            ``parallelism``), a Plan, or the path of one.
        global_batch_size: samples of a step; None: those of the example.
        clip_grad_norm: by the true global norm; 0 for none.
        session: None: one is opened, and closed with the result.
        profile: what was measured before; None: measured now, or taken from the cache where it still holds.
        measure_budget_s: about the seconds that measuring may take.
        rehearsal_s: those in which the plans that are foretold to be nearly the fastest are run; 0 to believe the prediction.

    Raises CaptureError, MeasureError, InfeasibleError or PlanError.
    """
    section = optimizer if isinstance(optimizer, OptimizerSection) else OptimizerSection()
    strategy, given = wanted_plan(plan)
    with ExitStack() as stack:
        here = stack.enter_context(open_session()) if session is None else session
        captured = capture_everywhere(here, model, example_batch)
        settings = Settings(
            global_batch_size=global_batch_size or as_source(example_batch, captured.graph).size,
            precision=precision,
            clip=clip_grad_norm > 0,
            optimizer=section,
            parallelism=ParallelismSection(
                strategy=strategy, micro_batch_sizes=micro_batch_sizes, rehearsal_s=rehearsal_s
            ),
        )
        prepared = prepare(
            here,
            captured,
            whole_model(model, captured, example_batch),
            settings,
            given=given,
            profile=profile,
            budget_s=measure_budget_s,
        )
        recorder = Recorder(rank=here.rank, device=here.device)
        worker = make_worker(
            here,
            prepared,
            model,
            optimizer=section if optimizer is None else optimizer,
            total_steps=total_steps,
            seed=seed,
            clip_grad_norm=clip_grad_norm,
            recorder=recorder,
        )
        return Distributed(session=here, prepared=prepared, worker=worker, recorder=recorder, closing=stack.pop_all())
