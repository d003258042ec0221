"""From a model to a program that can run: capture, measure, plan, lower. Every rank does it, and comes to the same."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from heterodyne.api.as_it_is import AsItIs, capture_as_it_is, require_same_count
from heterodyne.api.before_measuring import measuring_s, require_room
from heterodyne.api.checking import Verdict, check_everywhere, require_module, strategy_of_module
from heterodyne.api.compiled import compile_module, require_compiler, uncompiled
from heterodyne.api.host_activations import host_activation_bytes
from heterodyne.api.lone_steps import lone_steps
from heterodyne.api.measured_draws import MeasuredDraws
from heterodyne.api.optimizer_reach import OptimizerReach, require_within_reach, strategy_within_reach
from heterodyne.api.planning import Share, plan_and_try, plan_once
from heterodyne.api.rehearsal import rehearse
from heterodyne.api.session import Session
from heterodyne.api.stage_cutting import StageCutter
from heterodyne.cluster.profile import WHOLE, Profile
from heterodyne.errors import CaptureError, NoGraphError, PlanError
from heterodyne.frontend import Captured, CapturedModel, trace
from heterodyne.graph.ir import Block, ModelGraph
from heterodyne.job import OptimizerSection, ParallelismSection
from heterodyne.measure.block_run import BlockProgram
from heterodyne.measure.cache import Cache, default_folder
from heterodyne.measure.host_memory import host_context_bytes
from heterodyne.measure.session import Request, bytes_to_run, measure
from heterodyne.measure.trial import Part, try_share
from heterodyne.measure.whole_model import WholeModel
from heterodyne.measure.workbench import Workbench
from heterodyne.plan.bind import bind
from heterodyne.plan.lower import lower
from heterodyne.plan.plan import Plan
from heterodyne.plan.precision import Precisions, in_words, precision_of
from heterodyne.plan.program import Program
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.stages.deferred import DeferredWeights
from heterodyne.runtime.values_in_range import ValuesInRange
from heterodyne.runtime.weights.materialise import Stored
from heterodyne.runtime.worker import OptimizerFactory, Worker
from heterodyne.search.contenders import NEAR
from heterodyne.search.planned import Planned, Strategy
from heterodyne.search.planner import plan as search_plan
from heterodyne.units import counted, format_seconds

__all__ = [
    "Prepared",
    "Settings",
    "capture_everywhere",
    "make_worker",
    "measure_everywhere",
    "prepare",
    "stored_everywhere",
]

_TELL_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What planning needs to know of a job, whether it came from a file or from arguments.

    ``reach``: what an optimizer of the user's own must see at once; ``compile``: torch.compile makes code of stages and whole models.
    """

    global_batch_size: int
    precision: Precisions
    optimizer: OptimizerSection
    parallelism: ParallelismSection
    reach: OptimizerReach = field(default_factory=OptimizerReach)
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a rank needs to run. ``planned`` only on rank 0, the one that searched."""

    captured: CapturedModel
    profile: Profile
    plan: Plan
    program: Program
    planned: Planned | None


def capture_everywhere(
    session: Session,
    model: nn.Module,
    example_batch: Mapping[str, Tensor],
    as_it_is: AsItIs,
    *,
    name: str | None = None,
) -> CapturedModel:
    """Capture on every rank, and make sure that all captured the same. A model without a graph is taken in one piece.

    ``name``: of the model, None: its class. Raises CaptureError.
    """
    name = name or type(model).__name__
    with session.announced("capturing the model"):
        found = session.together(lambda: _traced(model, example_batch, as_it_is, name))
    missing = [error for error in session.communicator.all_gather_object(_without_graph(found)) if error is not None]
    captured = (
        capture_as_it_is(session, model, example_batch, as_it_is, missing[0], name)
        if missing or isinstance(found, NoGraphError)
        else found
    )
    fingerprints = session.communicator.all_gather_object(captured.graph.fingerprint)
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise CaptureError(
                f"rank {rank} captured another model ({fingerprint}) than rank 0 ({fingerprints[0]}): build the same model on "
                "every rank, from the same code and the same versions of torch and transformers. If the code goes through a set of words, "
                "whose order is another in each process, write sorted(...), or start all ranks with PYTHONHASHSEED=0"
            )
    return captured


def _traced(
    model: nn.Module, example_batch: Mapping[str, Tensor], as_it_is: AsItIs, name: str
) -> Captured | NoGraphError:
    try:
        captured = trace(model, example_batch, name=name)
    except NoGraphError as error:
        return error
    require_same_count(as_it_is.loss_count, example_batch, captured)
    ValuesInRange(captured.graph).require(example_batch, 0, "the example batch")
    return captured


def _without_graph(found: Captured | NoGraphError) -> NoGraphError | None:
    return NoGraphError(str(found), reason=found.reason) if isinstance(found, NoGraphError) else None


def measure_everywhere(
    session: Session,
    captured: CapturedModel,
    whole: WholeModel,
    settings: Settings,
    *,
    fresh: bool = False,
    to_plan: bool = False,
) -> Profile:
    """The profile of this model on this cluster, from the cache where it still holds. Raises MeasureError.

    ``to_plan``: for a plan of these devices alone, for which one device takes less time (see `measuring_s`).
    """
    graph = captured.graph
    sizes, while_faster = _sizes(graph, settings)
    most_s = settings.parallelism.measure_s
    budget_s = measuring_s(session.world_size, most_s) if to_plan else most_s
    request = Request(
        graph=graph,
        programs=_programs(captured, whole),
        cluster=session.cluster,
        device=session.device,
        micro_batch_sizes=sizes,
        while_faster=while_faster,
        precision=precision_of(settings.precision, session.cluster.devices[session.rank].kind),
        optimizer=settings.optimizer.name,
        budget_s=budget_s,
        halves=DeferredWeights
        if len(session.cluster.devices) > 1 and graph.opaque is None and not settings.compile
        else None,
        compile=compile_module if settings.compile else None,
        around=MeasuredDraws.of(graph, session.device),
        lone_steps=None
        if settings.compile or whole.weightless
        else lone_steps(session, captured, whole, optimizer=settings.optimizer, precision=settings.precision),
        model_bytes=whole.resident_bytes,
    )
    with session.announced(
        f"measuring {counted(session.world_size, 'device')}, which may take {format_seconds(budget_s)}"
    ):
        return measure(
            request,
            session.communicator,
            cache=Cache(folder=default_folder(os.environ)),
            refresh=fresh,
            say=session.say,
            progress=_progress(session),
        )


def _programs(captured: CapturedModel, whole: WholeModel) -> dict[str, BlockProgram]:
    """What is measured: each kind of block, and the model in one piece; of a model without a graph that is its one block."""
    kinds = captured.graph.kinds
    if captured.graph.opaque is not None:
        return dict.fromkeys(kinds, whole)
    return {**{kind: captured.block(block) for kind, block in kinds.items()}, WHOLE: whole}


def _progress(session: Session) -> Callable[[str, int, int], None]:
    """Tells every few seconds how far measuring has come on this rank."""
    told_s = time.monotonic()

    def tell(what: str, number: int, total: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > _TELL_EVERY_S:
            told_s = time.monotonic()
            session.say(f"  {what}: {number} of {total}")

    return tell


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
    if settings.compile:
        session.together(lambda: require_compiler(session.device))
    if given is not None:
        given = bind(given, captured.graph, session.cluster)
        require_within_reach(settings.reach, given)
        _require_fitting(given, captured, session, settings)
    else:
        settings = _with_strategy(
            settings, strategy_within_reach(settings.reach, settings.parallelism.strategy, captured.graph)
        )
    if given is None and profile is None:
        session.together(
            lambda: require_room(
                captured.graph, session.cluster, optimizer=settings.optimizer, parallelism=settings.parallelism
            )
        )
    if settings.parallelism.check_s and isinstance(captured, Captured):  # else it was done to take the model as it is
        verdict = check_everywhere(session, captured, whole, budget_s=settings.parallelism.check_s)
        settings = _heeding(verdict, settings, captured, session, given)

    rehearsed: Mapping[str, float] = {}
    sizes, while_faster = _sizes(captured.graph, settings)
    near = NEAR if given is None and profile is None and settings.parallelism.rehearsal_s else 1.0

    def search(known: Profile) -> Planned:
        return search_plan(
            captured.graph,
            session.cluster,
            known,
            global_batch_size=settings.global_batch_size,
            micro_batch_sizes=None if while_faster else sizes,
            optimizer=settings.optimizer.name,
            momentum=settings.optimizer.momentum,
            precision=settings.precision,
            bucket_bytes=None if settings.parallelism.bucket_size == "auto" else settings.parallelism.bucket_size,
            strategy=settings.parallelism.strategy,
            given=given,
            rehearsed=rehearsed,
            near=near,
            whole_weights=settings.reach.reach != "element",
        )

    bench = Workbench(
        device=session.device,
        precision=precision_of(settings.precision, session.cluster.devices[session.rank].kind),
        gather=session.communicator.all_gather_object,
        devices=[d.id for d in session.cluster.devices],
        compile=compile_module if settings.compile else None,
        around=MeasuredDraws.of(captured.graph, session.device),
    )

    def look(known: Profile) -> Profile:
        return _with_what_is_occupied(known, session, whole)

    def attempt(share: Share) -> float:
        if not _has_room(session, captured.graph, share):
            share = ()
        return try_share([(_part(captured, whole, ops), sizes) for ops, sizes in share], bench)

    if profile is not None:
        plan, planned = plan_once(session, search, profile, look)
    elif given is not None:
        profile = measure_everywhere(session, captured, whole, settings, to_plan=True)
        plan, planned, profile = plan_and_try(session, search, profile, attempt, look=look, trials=1)
    else:
        profile = measure_everywhere(session, captured, whole, settings, to_plan=True)
        plan, planned, profile = plan_and_try(session, search, profile, attempt, look=look)
        make = _rehearsal_workers(session, captured, whole, settings, profile)
        batch = _rehearsal_batch(whole, settings)
        rehearsed = rehearse(session, planned, make, batch, budget_s=settings.parallelism.rehearsal_s)
        if rehearsed:
            plan, planned = plan_once(session, search, profile, look)
    return _prepared(session, captured, profile, plan, planned)


def _sizes(graph: ModelGraph, settings: Settings) -> tuple[Sequence[int], bool]:
    """The micro-batch sizes to measure and try, and whether to stop at those that are no faster.

    Where a replica takes all its samples in one micro-batch, any share is a size of one; where BatchNorm sees one value a sample, one
    sample has no statistics."""
    given, largest = settings.parallelism.micro_batch_sizes, settings.global_batch_size
    doubled = sorted({*(1 << power for power in range(largest.bit_length())), largest})
    if graph.loss.reduction == "coupled":
        return doubled, False
    sizes: Sequence[int] = doubled if given == "auto" else given
    if any(op.name in graph.batch_statistics and len(op.outputs[0].shape) == 2 for op in graph.ops):
        sizes = [size for size in sizes if size > 1] or [2]
    return sizes, given == "auto"


def _prepared(
    session: Session, captured: CapturedModel, profile: Profile, plan: Plan, planned: Planned | None
) -> Prepared:
    program = lower(plan, captured.graph, session.cluster)
    return Prepared(captured=captured, profile=profile, plan=plan, program=program, planned=planned)


def _rehearsal_workers(
    session: Session, captured: CapturedModel, whole: WholeModel, settings: Settings, profile: Profile
) -> Callable[[Plan], Worker]:
    """Workers on copies of the model, with rank 0's weights; as those of the run, but for the rate of learning."""

    def make(plan: Plan) -> Worker:
        first = session.rank == 0
        found = _stored(session, whole)
        model, stored = found or (
            session.together(lambda: whole.build(torch.device("cpu")) if first else whole.empty()),
            None,
        )
        return make_worker(
            session,
            _prepared(session, captured, profile, plan, None),
            model,
            stored=stored,
            optimizer=settings.optimizer,
            total_steps=1,
            seed=0,
            clip_grad_norm=1.0,
            compile=settings.compile,
        )

    return make


def stored_everywhere(
    session: Session, find: Callable[[], tuple[nn.Module, Stored] | None]
) -> tuple[nn.Module, Stored] | None:
    """A model without weights and where they are read, if every rank finds them. Collective."""
    found = session.together(find)
    there = all(session.communicator.all_gather_object(found is not None))
    return found if there else None


def _stored(session: Session, whole: WholeModel) -> tuple[nn.Module, Stored] | None:
    return None if whole.stored is None else stored_everywhere(session, whole.stored)


def _rehearsal_batch(whole: WholeModel, settings: Settings) -> dict[str, Tensor]:
    tensors = whole.inputs_of(settings.global_batch_size, torch.device("cpu"))
    return {i.name: tensor for i, tensor in zip(whole.inputs, tensors, strict=True)}


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
    """Whether a CPU worker can try its share beside what it occupies. A plan may need less than its parts do by themselves, where
    their weights and gradients are shared out; it is then believed as it is."""
    if session.device.type != "cpu":
        return True
    needed = max((bytes_to_run(graph, _stage(ops), max(sizes)) for ops, sizes in share if sizes), default=0.0)
    return needed <= session.cluster.devices[session.rank].memory_bytes - host_context_bytes()


def _stage(ops: tuple[int, int]) -> Block:
    return Block(index=0, name=f"ops {ops[0]} to {ops[1]}", kind="stage", start=ops[0], stop=ops[1])


def _part(captured: CapturedModel, whole: WholeModel, ops: tuple[int, int]) -> Part:
    """A stage as something that runs by itself; the whole model is the user's own."""
    start, stop = ops
    if (start, stop) == (0, len(captured.graph.ops)):
        return whole
    return captured.block(_stage(ops))


def _heeding(
    verdict: Verdict, settings: Settings, captured: CapturedModel, session: Session, given: Plan | None
) -> Settings:
    """The settings as far as the check lets them: plans that run pieces of the graph may be refused."""
    if not verdict.module_only:
        return settings
    if given is not None:
        require_module(verdict, given, lower(given, captured.graph, session.cluster))
        return settings
    strategy = strategy_of_module(verdict, settings.parallelism.strategy, captured.graph)
    return _with_strategy(settings, strategy)


def _with_strategy(settings: Settings, strategy: Strategy) -> Settings:
    return replace(settings, parallelism=settings.parallelism.model_copy(update={"strategy": strategy}))


def _require_fitting(given: Plan, captured: CapturedModel, session: Session, settings: Settings) -> None:
    """Raises PlanError if the plan is of another model, cluster or job, or breaks a rule."""
    lower(given, captured.graph, session.cluster)  # also an order that would wait for ever, before anything is measured
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


def make_worker(
    session: Session,
    prepared: Prepared,
    model: nn.Module,
    *,
    optimizer: OptimizerSection | OptimizerFactory,
    total_steps: int,
    seed: int,
    clip_grad_norm: float,
    recorder: Recorder | None = None,
    compile: bool = False,
    whole_weights: bool = False,
    stored: Stored | None = None,
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> Worker:
    """The worker of this rank, obeying what was prepared. Collective; see `Worker`. ``model`` may be compiled; with ``compile`` stages
    and whole models are.
    """
    captured, module = prepared.captured, uncompiled(model)
    if compile and module is model:
        model = copy.copy(module)
        model.compile()
    worker = Worker(
        module,
        graph=prepared.captured.graph,
        plan=prepared.plan,
        program=prepared.program,
        cluster=session.cluster,
        communicator=session.communicator,
        loss_count=prepared.captured.loss_count,
        optimizer=optimizer,
        total_steps=total_steps,
        seed=seed,
        clip_grad_norm=clip_grad_norm,
        host_activation_bytes=host_activation_bytes(
            prepared.plan, prepared.program, captured.graph, session.cluster, prepared.profile
        )[session.rank],
        recorder=recorder,
        watch=session.watchdog,
        stage_programs=StageCutter(captured, module) if isinstance(captured, Captured) else None,
        compiled=None if module is model else model,
        compile_stages=compile,
        whole_weights=whole_weights or (isinstance(optimizer, OptimizerSection) and optimizer.whole_weights),
        stored=stored,
        weights=weights,
        say=session.say,
    )
    session.give_back()  # the weights that the plan has elsewhere
    if compile:
        apart = [
            rank for rank, does in enumerate(session.communicator.all_gather_object(worker.runs_compiled)) if not does
        ]
        if apart:
            session.say(
                f"not compiled on {'rank' if len(apart) == 1 else 'ranks'} {', '.join(map(str, apart))}: dropout and BatchNorm that give "
                "what one device gives, stages in parts, and backwards in halves run as they are"
            )
    return worker
