"""Which micro-batch sizes fit which device, with recompute or offload where needed, and what a device that fits none lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from heterodyne.cluster.spec import Device
from heterodyne.cost.memory import MemoryUse
from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Pipeline, Plan, Stage
from heterodyne.search.host_room import lacking_on_hosts
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.points import points_of
from heterodyne.search.predict import overflow, plan_of, predict, stage_of
from heterodyne.search.relief import ACTIONS, Actions, choices_of, with_relief
from heterodyne.search.relieved import relieved
from heterodyne.search.shortfall import shortfall
from heterodyne.sim.run import Simulation
from heterodyne.units import format_bytes

__all__ = ["Fit", "fit_devices", "nothing_fits", "runs_of"]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The allowed sizes that fit one device.

    Args:
        sizes: those that fit, ascending; none: the device has to stay idle.
        stage: the model on it with the blocks recomputed or offloaded with which these sizes fit; None: it keeps all activations.
        smallest: the smallest allowed size, and `use` what the device needs for it.
        use_at_one: what it would need for micro-batches of one sample.
    """

    device: Device
    sizes: tuple[int, ...]
    smallest: int
    use: MemoryUse
    use_at_one: MemoryUse
    stage: Stage | None = None

    def on(self, device: Device) -> Fit:
        """The same of a device that is alike in all that counts."""
        stage = None if self.stage is None else self.stage.model_copy(update={"devices": (device.id,)})
        return replace(self, device=device, stage=stage)

    @property
    def lacks_bytes(self) -> int:
        """What is missing for the smallest allowed micro-batch; 0 if it fits."""
        return max(0, self.use.total - self.device.memory_bytes)

    def say(self) -> str:
        """Why the device cannot take part, and what would help."""
        use = self.use
        parts = {
            "parameters": use.parameters,
            "gradients": use.gradients,
            "their reduction": use.buckets,
            "optimizer": use.optimizer,
            "activations": use.activations + use.workspace,
            "framework": use.context,
        }
        need = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        text = (
            f"{self.device.id} has {format_bytes(self.device.memory_bytes)} and needs {format_bytes(use.total)} "
            f"for micro-batches of {self.smallest} ({need}): it lacks {format_bytes(self.lacks_bytes)}"
        )
        if self.use_at_one.total <= self.device.memory_bytes:
            return text + "; micro-batches of 1 would fit, so add 1 to parallelism.micro_batch_sizes"
        return text


def fit_devices(
    model: CostModel,
    sizes: Sequence[int],
    global_batch_size: int,
    *,
    actions: Actions = ACTIONS,
    state: float = 1.0,
) -> tuple[Fit, ...]:
    """The fit of every device, in the order of ranks. A micro-batch is never larger than the global batch.

    ``actions``: what may give relief to a device that lacks memory; just so much does as the smallest size asks for, in the way that
    takes the least time. ``state``: the part of the optimizer's state that is on each device.
    """
    tried = sorted({min(size, global_batch_size) for size in sizes})
    found: list[Fit] = []
    for device in model.cluster.devices:
        like = next((fit for fit in found if _alike(model, fit.device, device)), None)
        if like is not None:
            found.append(like.on(device))
            continue
        uses = {size: model.memory_use(device.id, size).with_state(state) for size in {1, *tried}}
        fit = Fit(
            device=device,
            sizes=tuple(size for size in tried if uses[size].total <= device.memory_bytes),
            smallest=tried[0],
            use=uses[tried[0]],
            use_at_one=uses[1],
        )
        if not fit.sizes:
            fit = _with_relief(model, fit, tried, choices_of(model, (device.id,), actions))
        found.append(fit)
    return tuple(found)


def _alike(model: CostModel, one: Device, other: Device) -> bool:
    """Whether two devices are of one kind in one node, with as much memory and the same measurements."""
    return replace(one, id=other.id) == other and model.measured(one.id) == model.measured(other.id)


def _with_relief(model: CostModel, fit: Fit, tried: Sequence[int], choices: Iterable[Actions]) -> Fit:
    """The same with activations that are recomputed, or wait on the host, where that makes room; else as it is."""
    device, points = fit.device.id, points_of(model.graph)
    plain = stage_of((0, len(model.graph.ops)), (device,))
    alive = dict(zip(points.positions, points.crossing, strict=True))
    best_s, best = inf, None
    for actions in choices:

        def leaner(_: object, __: object, lacks: Mapping[str, int], actions: Actions = actions) -> Plan:
            plan = _alone(model, plain, fit.smallest)
            lacking = {device: fit.lacks_bytes + lacks.get(device, 0)}
            pipelines = tuple(with_relief(model, p, lacking, [1], alive, actions) for p in plan.pipelines)
            return plan.model_copy(update={"pipelines": pipelines})

        made, played = relieved(model, leaner(None, None, {}), {}, leaner)
        (stage,) = made.pipelines[0].stages
        passes_s = _passes_s(model, stage, fit.smallest)
        if passes_s < best_s and _fits(model, made, played):
            best_s, best = passes_s, stage
    if best is None:
        return fit
    sizes = tuple(s for s in tried if _fits(model, *predict(model, _alone(model, best, s), {})))
    return replace(fit, sizes=sizes, stage=best)


def _fits(model: CostModel, made: Plan, played: Simulation) -> bool:
    """Whether devices have room, and their hosts for what is kept there."""
    return not overflow(model, made, played) and not lacking_on_hosts(model, made, played)


def _alone(model: CostModel, stage: Stage, size: int) -> Plan:
    """The plan in which the device of a stage of all ops runs one micro-batch."""
    return plan_of(model, size, (Pipeline(micro_batches=MicroBatches((size,)), stages=(stage,)),))


def _passes_s(model: CostModel, stage: Stage, size: int) -> float:
    """Seconds of its forward and backward."""
    costs = model.of(_alone(model, stage, size)).ranks[model.cluster.rank(stage.devices[0])]
    assert costs is not None  # it is the one that runs
    return sum(stage.compute_s for stage in costs.stages.values())


def runs_of(model: CostModel, fits: Iterable[Fit]) -> dict[str, MicroBatchChoice]:
    """How those devices that can hold the model best run samples."""
    return {
        fit.device.id: MicroBatchChoice(
            seconds=_seconds(model, fit),
            sizes=fit.sizes,
            fixed_s=model.fixed_s(fit.device.id),
            stage=fit.stage,
        )
        for fit in fits
        if fit.sizes
    }


def _seconds(model: CostModel, fit: Fit) -> Callable[[float], float]:
    """Of forward and backward of a micro-batch, with what is computed again."""
    stage = fit.stage
    if stage is None:
        return model.compute[fit.device.id].micro_batch_s
    return lambda size: _passes_s(model, stage, int(size)) if size else 0.0


def nothing_fits(
    fits: Iterable[Fit], optimizer: str, precision: str, *, pipeline: str = "", hosts: str = ""
) -> InfeasibleError:
    """The error for a model that no device can hold: what each lacks, and what would help.

    ``pipeline``: why the devices cannot hold it together either, if that was tried; ``hosts``: why not with a part of it on hosts.
    """
    fits = tuple(fits)
    helps = ["devices with more memory"]
    if any(fit.smallest > 1 for fit in fits):
        helps.append("smaller parallelism.micro_batch_sizes")
    if all(fit.use.context >= fit.device.memory_bytes for fit in fits):
        pass  # nothing that the job could say leaves room for a model
    elif optimizer == "adamw":
        helps.append("optimizer.name sgd, which keeps one state a parameter or none, not two")
    if precision == "fp32" and any(fit.use.activations > fit.lacks_bytes for fit in fits):
        helps.append("training.precision bf16, which halves the activations")
    return InfeasibleError(
        "no device can hold a copy of the model:\n  - "
        + "\n  - ".join(fit.say() for fit in fits)
        + (f"\nnor can they hold it together: {pipeline}\n{_shared_out(fits)}" if pipeline else "")
        + (f"\nnor with a part of it on hosts: {hosts}" if hosts else "")
        + "\nwhat would help: "
        + "; ".join(helps),
        shortfalls={fit.device.id: fit.lacks_bytes for fit in fits},
    )


def _shared_out(fits: Sequence[Fit]) -> str:
    """What all devices lack together."""
    use = max((fit.use for fit in fits), key=lambda use: use.parameters + use.gradients + use.optimizer)
    hosts = all(fit.device.backend != "cpu" for fit in fits)
    # Devices of one kind may be given unequal memory, as parts of one host are.
    kinds: dict[tuple[str, int], list[int]] = {}
    for fit in fits:
        kinds.setdefault((fit.device.kind, fit.device.memory_bytes), []).append(
            fit.device.memory_bytes - fit.use.context
        )
    unequal = len(kinds) > len({kind for kind, _ in kinds})
    return shortfall(
        {
            f"{kind} with {format_bytes(memory)}" if unequal else kind: (len(rooms), min(rooms))
            for (kind, memory), rooms in kinds.items()
        },
        on_devices=use.parameters + use.gradients + (0 if hosts else use.optimizer),
        on_hosts=use.optimizer if hosts else 0,
    )
