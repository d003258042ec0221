"""From a captured model to a program that can run: check, measure, plan, try, rehearse, lower. Every rank comes to the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from heterodyne.api.before_measuring import require_room
from heterodyne.api.checking import check_everywhere, require_exact
from heterodyne.api.compiled import compile_module, require_compiler
from heterodyne.api.measured_draws import MeasuredDraws
from heterodyne.api.measuring import measure_everywhere, sizes_to_measure
from heterodyne.api.planning import Share, plan_and_try, plan_once
from heterodyne.api.rank_worker import make_worker, stored_everywhere
from heterodyne.api.rehearsal import rehearse
from heterodyne.api.session import Session
from heterodyne.api.settings import Prepared, Settings
from heterodyne.cluster.profile import Profile
from heterodyne.cost.collective import Collectives
from heterodyne.errors import PlanError
from heterodyne.frontend import Captured, CapturedModel
from heterodyne.graph.ir import Block, ModelGraph
from heterodyne.measure.host_memory import host_context_bytes
from heterodyne.measure.session import bytes_to_run
from heterodyne.measure.trial import TrialPart, try_share
from heterodyne.measure.whole_model import WholeModel
from heterodyne.measure.workbench import Workbench
from heterodyne.plan.bind import bind
from heterodyne.plan.lower import lower
from heterodyne.plan.order import is_asynchronous
from heterodyne.plan.plan import Plan
from heterodyne.plan.precision import Precisions, in_words, precision_of
from heterodyne.processes.heap import only_new_garbage
from heterodyne.runtime.worker import Worker
from heterodyne.search.contenders import NEAR
from heterodyne.search.planned import Planned, Rehearsed

__all__ = ["prepare"]

_REHEARSALS = 2
"""The second one only if a plan that may be faster has come to fit since the first."""


@only_new_garbage()
def prepare(
    session: Session,
    captured: CapturedModel,
    whole: WholeModel,
    settings: Settings,
    *,
    given: Plan | None = None,
    profile: Profile | None = None,
) -> Prepared:
    """Check, measure, plan, try, rehearse and lower. With a ``given`` plan it is obeyed; it is weighed all the same, so that its
    prediction can be checked. With a ``profile`` nothing is measured, nothing tried and nothing rehearsed.

    A plan that does not fit, or a model that the devices cannot hold, is refused before anything is measured.

    Raises PlanError, VerifyError, InfeasibleError or MeasureError, on every rank alike.
    """
    if profile is not None:
        profile.require({d.id: precision_of(settings.precision, d.kind) for d in session.cluster.devices})
    if given is not None:
        given = bind(given, captured.graph, session.cluster)
    settings = _admitted(session, captured, whole, settings, given, measured=profile is not None)
    planning = _Planning(session=session, captured=captured, whole=whole, settings=settings, given=given)
    if profile is not None:
        _know_links(session, profile)
        plan, planned = plan_once(session, planning.search, profile, planning.look)
        return planning.prepared(profile, plan, planned)
    profile = measure_everywhere(session, captured, whole, settings, to_plan=True)
    _know_links(session, profile)
    if given is not None:
        plan, planned, profile = plan_and_try(
            session, planning.search, profile, planning.attempt, look=planning.look, trials=1
        )
        return planning.prepared(profile, plan, planned)
    near = NEAR if settings.parallelism.rehearsal_s else 1.0
    search = partial(planning.search, near=near)
    plan, planned, profile = plan_and_try(session, search, profile, planning.attempt, look=planning.look)
    for _ in range(_REHEARSALS):
        rehearsed = rehearse(
            session,
            planned,
            planning.rehearsal_workers(profile),
            planning.rehearsal_batch(),
            budget_s=settings.parallelism.rehearsal_s,
            training_steps=settings.training_steps,
        )
        if not rehearsed:
            break
        plan, planned = plan_once(session, partial(search, rehearsed=rehearsed), profile, planning.look)
    return planning.prepared(profile, plan, planned)


def _know_links(session: Session, profile: Profile) -> None:
    """Give the communicator the measured links between hosts, the same on every rank."""
    measured = Collectives(cluster=session.cluster, samples=profile.links).to_other_hosts()
    session.communicator.links = session.communicator.broadcast_object(measured, 0)


def _admitted(
    session: Session,
    captured: CapturedModel,
    whole: WholeModel,
    settings: Settings,
    given: Plan | None,
    *,
    measured: bool,
) -> Settings:
    """The settings as far as the model, its optimizer and the check of its exactness let them; all that needs no measurement."""
    if settings.compile:
        session.together(lambda: require_compiler(session.device))
    require_exact(settings, captured.graph, given)
    if given is not None:
        _require_fitting(given, captured, session, settings)
    elif not measured:
        able = settings.able(captured.graph)
        session.together(
            lambda: require_room(able, session.cluster, optimizer=settings.optimizer, parallelism=settings.parallelism)
        )
    if settings.parallelism.check_s and isinstance(captured, Captured):  # else it was done to take the model as it is
        verdict = check_everywhere(session, captured, whole, budget_s=settings.parallelism.check_s)
        settings = replace(settings, module_only=verdict.module_only)
        require_exact(settings, captured.graph, given)
    return settings


@dataclass(frozen=True, kw_only=True)
class _Planning:
    """Planning one model on the devices of a session. ``given``: the plan that is obeyed, if one was named."""

    session: Session
    captured: CapturedModel
    whole: WholeModel
    settings: Settings
    given: Plan | None

    def search(self, known: Profile, *, near: float = 1.0, rehearsed: Mapping[str, Rehearsed] | None = None) -> Planned:
        """On the rank that plans, which alone loads the planner. ``near``, ``rehearsed``: see `search.planner.plan`."""
        from heterodyne.search.planner import plan as search_plan

        settings = self.settings
        sizes, while_faster = sizes_to_measure(self.captured.graph, settings)
        return search_plan(
            self.captured.graph,
            self.session.cluster,
            known,
            global_batch_size=settings.global_batch_size,
            micro_batch_sizes=None if while_faster else sizes,
            optimizer=settings.optimizer.name,
            momentum=settings.optimizer.momentum,
            precision=settings.precision,
            bucket_bytes=None if settings.parallelism.bucket_size == "auto" else settings.parallelism.bucket_size,
            strategy=settings.parallelism.strategy,
            given=self.given,
            rehearsed=rehearsed or {},
            near=near,
            able=settings.able(self.captured.graph),
        )

    def look(self, known: Profile) -> Profile:
        return _with_what_is_occupied(known, self.session, self.whole)

    def attempt(self, share: Share) -> float:
        """Seconds that this rank takes for its share of a plan; a share that it has no room for is not tried."""
        if not _has_room(self.session, self.captured.graph, share):
            share = ()
        return try_share([(self._part(ops), sizes) for ops, sizes in share], self._bench)

    @cached_property
    def _bench(self) -> Workbench:
        session = self.session
        return Workbench(
            device=session.device,
            precision=precision_of(self.settings.precision, session.cluster.devices[session.rank].kind),
            gather=session.communicator.all_gather_object,
            devices=[d.id for d in session.cluster.devices],
            compile=compile_module if self.settings.compile else None,
            around=MeasuredDraws.of(self.captured.graph, session.device),
        )

    def _part(self, ops: tuple[int, int]) -> TrialPart:
        """A stage as something that runs by itself; the whole model is the user's own."""
        start, stop = ops
        if (start, stop) == (0, len(self.captured.graph.ops)):
            return self.whole
        return self.captured.block(_stage(ops))

    def prepared(self, profile: Profile, plan: Plan, planned: Planned | None) -> Prepared:
        graph = self.captured.graph
        lowered = lower(plan, graph, self.session.cluster, able=self.settings.able(graph))
        return Prepared(captured=self.captured, profile=profile, lowered=lowered, planned=planned)

    def rehearsal_workers(self, profile: Profile) -> Callable[[Plan], Worker]:
        """Workers on copies of the model, with rank 0's weights; as those of the run, but for the rate of learning."""
        session, whole = self.session, self.whole

        def make(plan: Plan) -> Worker:
            found = None if whole.stored is None else stored_everywhere(session, whole.stored)
            first = session.rank == 0
            model, stored = found or (
                session.together(lambda: whole.build(torch.device("cpu")) if first else whole.empty()),
                None,
            )
            prepared = self.prepared(profile, plan, None)
            return make_worker(
                session,
                prepared,
                model,
                stored=stored,
                optimizer=self.settings.optimizer,
                total_steps=1,
                seed=0,
                clip_grad_norm=float(prepared.lowered.clip),
                compile=self.settings.compile,
            )

        return make

    def rehearsal_batch(self) -> dict[str, Tensor]:
        tensors = self.whole.inputs_of(self.settings.global_batch_size, torch.device("cpu"))
        return {i.name: tensor for i, tensor in zip(self.whole.inputs, tensors, strict=True)}


def _with_what_is_occupied(known: Profile, session: Session, whole: WholeModel) -> Profile:
    """The profile with what each CPU worker occupies by now: libraries that its first steps have loaded, what trials and rehearsals leave
    in its heap, and of the one that plans the alternatives and tables of the searches before. Collective.
    """
    session.give_back()
    seen = host_context_bytes() - whole.resident_bytes if session.device.type == "cpu" else 0
    devices = dict(known.devices)
    for device, now in zip(session.cluster.devices, session.communicator.all_gather_object(seen), strict=True):
        before = devices[device.id].context_bytes
        devices[device.id] = replace(devices[device.id], context_bytes=max(before, now) if before else 0)
    return replace(known, devices=devices)


def _has_room(session: Session, graph: ModelGraph, share: Share) -> bool:
    """Return whether a CPU worker can try its share beside what it occupies. A plan may need less than its parts do by themselves, where
    their weights and gradients are shared out; it is then believed as it is."""
    if session.device.type != "cpu":
        return True
    needed = max((bytes_to_run(graph, _stage(ops), max(sizes)) for ops, sizes in share if sizes), default=0.0)
    return needed <= session.cluster.devices[session.rank].memory_bytes - host_context_bytes()


def _stage(ops: tuple[int, int]) -> Block:
    return Block(index=0, name=f"ops {ops[0]} to {ops[1]}", kind="stage", start=ops[0], stop=ops[1])


def _require_fitting(given: Plan, captured: CapturedModel, session: Session, settings: Settings) -> None:
    """Raises PlanError if the plan is of another model, cluster or job, or breaks a rule."""
    # Also an order that would wait for ever is found before anything is measured.
    lower(given, captured.graph, session.cluster, able=settings.able(captured.graph))
    if is_asynchronous(given) and settings.parallelism.asynchronous is None:
        raise PlanError(
            f"the plan trains with predicted weights ({given.schedule}), which is inexact, and the job does not ask for that: write "
            "parallelism.async: predicted (PlanOptions(asynchronous='predicted') in a loop), take a plan of another schedule, or plan "
            "again (--replan where a run goes on)"
        )
    for what, there, here in (
        ("samples a step", given.global_batch_size, settings.global_batch_size),
        ("precision", given.precision, settings.precision),
    ):
        if there != here:
            raise PlanError(
                f"the plan was made for another job ({what}: {_shown(there)}, the job has {_shown(here)}): plan again for this job"
            )


def _shown(value: int | Precisions) -> str:
    return str(value) if isinstance(value, int) else in_words(value)
