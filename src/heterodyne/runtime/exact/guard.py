"""What nobody thought of: the model as a plan will run it, against one plain call of the module, on a few samples.

It runs in one process, by the worker of the runtime itself, under two plans for one device: the module in unequal parts of a batch,
and the captured graph cut in two, in the same parts. Losses and gradients of both are compared with those of ``module(**batch)``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite

import torch
from torch import Tensor, nn

from heterodyne.cluster.spec import Cluster, Device
from heterodyne.errors import DataError, HeterodyneError, PlanError, VerifyError
from heterodyne.graph.ir import ModelGraph
from heterodyne.loss_count import LossCount
from heterodyne.model_output import LOSS
from heterodyne.plan.lower import lower
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.exact.finding import Finding, Form
from heterodyne.runtime.exact.one_device import one_device_plan, places_to_cut
from heterodyne.runtime.exact.parts import nothing_from_python
from heterodyne.runtime.exact.same_again import MOST_NAMES, changed_names, kept_tensors, words_of_second_call
from heterodyne.runtime.exact.small_batch import EMPTY, SmallBatch, small_batch, wake_batch, wake_buffers, wake_weights
from heterodyne.runtime.exact.verify import BAR, compare, gradients_after, rounding_bar
from heterodyne.runtime.slices import BatchSource
from heterodyne.runtime.stages.forward import Forward
from heterodyne.runtime.stages.stage_builder import StagePrograms
from heterodyne.runtime.weights.trainable import forward_order, trainable_parameters
from heterodyne.runtime.worker import Worker
from heterodyne.units import format_seconds

__all__ = ["compare_forms"]

_ROUNDINGS = 16.0
_RUNS = 4  # in one piece, twice, in parts, cut

Gradients = dict[str, Tensor]


def compare_forms(
    module: nn.Module,
    source: BatchSource,
    *,
    graph: ModelGraph,
    loss_count: LossCount,
    stage_programs: StagePrograms | None,
    device: torch.device,
    samples: int = 5,
    budget_s: float = inf,
) -> tuple[Finding, ...]:
    """Compare the module in parts and, if that agrees, the graph cut in two; return nothing where the plain call gives no numbers.

    Buffers and entries of the batch that are zero are then given other values, and what they hid is looked for once more.

    Args:
        module: with weights, on the device; a copy, for its weights, gradients and buffers are written.
        source: a real batch, of which some samples are taken.
        stage_programs: cut the captured graph; None: there is none.
        budget_s: about the seconds that there are.

    Raises TimeoutError if a plain call takes more than its part of these seconds, VerifyError if it fails on these samples, DataError
    if none of them counts in the loss, and CaptureError for what the runtime refuses in a module.
    """
    started_s = time.perf_counter()
    wake_weights(module)

    def compared(budget_s: float, *, woken: bool = False) -> tuple[Finding, ...]:
        findings: tuple[Finding, ...] = ()
        for empty in EMPTY:
            batch = small_batch(source, graph, loss_count, dict(module.named_buffers()), samples, empty=empty)
            tensors = {**batch.tensors, **(wake_batch(batch.tensors) if woken else {})}
            try:
                forms = _Forms(module, replace(batch, tensors=tensors), graph, loss_count, stage_programs, device)
                found = forms.compared(budget_s)
            except (DataError, VerifyError):
                if not batch.empty_first:
                    raise
                continue  # the loss has no value, or not in parts, where nothing counts: that is told when such data comes
            if not findings or not all(finding.agrees for finding in found):
                findings = found
            if findings and (not batch.made_up or all(finding.agrees for finding in findings)):
                break  # what made-up labels show, the data alone may show too, and then they are not the reason
        return findings

    findings = compared(budget_s)
    names = [*wake_buffers(module, graph), *wake_batch(source.samples(0, min(samples, source.size)))]
    if not names or not all(finding.agrees for finding in findings):
        return findings
    try:
        again = compared(budget_s - (time.perf_counter() - started_s), woken=True)
    except (HeterodyneError, TimeoutError):
        return findings  # the model need not take other values
    wrong = tuple(replace(f, woken=tuple(names)) for f in again if f.beyond and not f.failure)
    return wrong or findings


class _Forms:
    """The forms of one module on one batch, and the plain call that they are compared with."""

    def __init__(
        self,
        module: nn.Module,
        batch: SmallBatch,
        graph: ModelGraph,
        loss_count: LossCount,
        stage_programs: StagePrograms | None,
        device: torch.device,
    ) -> None:
        self._module = module
        self._batch = replace(batch, tensors={name: tensor.clone() for name, tensor in batch.tensors.items()})
        self._graph = graph
        self._loss_count = loss_count
        self._programs = stage_programs
        self._device = device
        self._order = forward_order(module, graph)
        self._buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}

    def compared(self, budget_s: float) -> tuple[Finding, ...]:
        started_s = time.perf_counter()
        try:
            self._reference = self._plain()
        except (HeterodyneError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise VerifyError(
                f"{self._graph.name} fails on {self._batch.size} samples of the example batch with {type(error).__name__}: {error}"
            ) from error
        self._require_same_again()
        needed_s = _RUNS / 2 * (time.perf_counter() - started_s)
        if needed_s > budget_s:
            raise TimeoutError(f"it takes about {format_seconds(needed_s)}, and there are {format_seconds(budget_s)}")
        if not self._finite:
            return ()
        findings = []
        for run in (self._in_parts, self._cut):
            finding = run()
            if finding is not None:
                findings.append(finding if finding.agrees else self._judged(finding))
                if not findings[-1].agrees:
                    break
        return tuple(findings)

    def _require_same_again(self) -> None:
        """Raise VerifyError if a second call gives something else: the parts of a batch are as many calls."""
        data = {name: parameter.data_ptr() for name, parameter in self._module.named_parameters()}
        before = kept_tensors(self._module)
        again = self._plain()
        moved = [name for name, parameter in self._module.named_parameters() if parameter.data_ptr() != data[name]]
        if moved:
            raise VerifyError(
                f"{self._graph.name} puts other values into {moved[0]!r} in its forward (.data = ...). A plan that cuts the model does not "
                "run that line, and each micro-batch would run it once more. Change weights outside of forward, once a step, or compute "
                "what is used from them: w = normalize(self.weight)"
            )
        if self._finite and not compare(*again, *self._reference).largest <= rounding_bar(self._device):
            names = changed_names(before, kept_tensors(self._module))
            self._require_batch_untouched()
            raise VerifyError(
                words_of_second_call(self._graph.name, first=self._reference[0], again=again[0], names=names)
            )

    def _require_batch_untouched(self) -> None:
        """Raise VerifyError, with the names, if forward writes into the batch."""
        written = [name for name, tensor in self._batch.tensors.items() if tensor._version]
        if written:
            raise VerifyError(
                f"{self._graph.name} writes into {', '.join(map(repr, written[:MOST_NAMES]))} of its batch in forward, and gives "
                "something else when it is called with that batch again, as where blocks are recomputed. Make a new tensor: x = x * 2 in "
                "place of x.mul_(2) or x *= 2"
            )

    @property
    def _finite(self) -> bool:
        loss, gradients = self._reference
        return isfinite(loss) and all(bool(gradient.isfinite().all()) for gradient in gradients.values())

    def _in_parts(self) -> Finding | None:
        """None where the terms of the loss have denominators of their own: then the graph is what runs, and the cut shows it."""
        return None if self._graph.loss.reduction == "terms" else self._found("parts", partial(self._run, [0]))

    def _cut(self) -> Finding | None:
        """None if there is no place where the graph can be cut."""
        if self._programs is None or self._graph.loss.reduction == "coupled":
            return None
        for start in places_to_cut(self._graph):
            try:
                return self._found("cut", partial(self._run, [0, start]))
            except PlanError:
                continue  # a cut here would change the result, which the planner is told too
        return None

    def _judged(self, finding: Finding) -> Finding:
        """The same with what is beyond rounding. How much that is in this model shows in its own gradients when each weight is
        rounded once more; unless a second plain call gives something else even so, as that of a counter does.
        """
        if finding.failure or compare(*self._plain(), *self._reference).largest > BAR:
            return finding
        kept = {name: parameter.detach().clone() for name, parameter in self._module.named_parameters()}
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in filter(Tensor.is_floating_point, self._module.parameters()):
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_((1 + self._epsilon * signs).to(parameter))
        rounded = compare(*self._plain(), *self._reference)
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                parameter.copy_(kept[name])
        noise = {LOSS: rounded.loss, **dict(rounded.gradients)}
        errors = dict(finding.all_errors)
        beyond = [name for name in finding.beyond if not errors[name] <= _ROUNDINGS * noise.get(name, 0.0)]
        return replace(finding, beyond=tuple(beyond))

    @property
    def _epsilon(self) -> float:
        """The rounding of the coarsest numbers that the model computes with."""
        names = {spec.dtype for op in self._graph.ops for spec in op.outputs} | {
            p.dtype for p in self._graph.parameters
        }
        dtypes = [dtype for name in names if isinstance(dtype := getattr(torch, name, None), torch.dtype)]
        return max([torch.finfo(d).eps for d in dtypes if d.is_floating_point], default=torch.finfo(torch.float32).eps)

    def _found(self, form: Form, run: Callable[[], tuple[float, Gradients]]) -> Finding:
        finding = Finding(form=form, parts=self._batch.parts, empty_first=self._batch.empty_first)
        try:
            loss, gradients = run()
        except (HeterodyneError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001  # whatever the model raises: it does not run in this form
            return replace(finding, failure=f"{type(error).__name__}: {error}")
        compared = compare(loss, gradients, *self._reference)
        errors = dict(compared.gradients)
        ordered = {name: errors[name] for name in sorted(errors, key=lambda n: self._order.get(n, len(self._order)))}
        finding = replace(
            finding,
            losses=(loss, self._reference[0]),
            loss_error=compared.loss,
            errors=ordered,
            largest=compared.largest,
        )
        return replace(finding, beyond=tuple(name for name, error in finding.all_errors if not error <= BAR))

    def _plain(self) -> tuple[float, Gradients]:
        """One call of the module on all samples, and one backward."""
        self._restore()
        forward = Forward(self._module, self._graph, device=self._device, precision="fp32", seed=0)
        draws = forward.draws(0, range(self._batch.size))

        def run() -> float:
            with nothing_from_python():
                loss = forward.loss(self._batch.tensors, draws)
            forward.backward(loss, 1.0, draws)
            return loss.item()

        return gradients_after(run, trainable_parameters(self._module, self._graph))

    def _run(self, starts: Sequence[int]) -> tuple[float, Gradients]:
        """By a worker that has the device to itself."""
        self._restore()
        cluster = Cluster(
            name="one device",
            devices=(Device(id="this", kind="this", node="this", memory_bytes=0, backend=self._device.type),),
        )
        plan = one_device_plan(self._graph, cluster, starts, self._batch.parts)
        with Communicator(rank=0, world_size=1, device=self._device) as alone:
            worker = Worker(
                self._module,
                lowered=lower(plan, self._graph, cluster, clip=False),
                communicator=alone,
                loss_count=self._loss_count,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
                total_steps=1,
                seed=0,
                stage_programs=self._programs,
            )
            try:
                loss, gradients = worker.gradients(self._batch.tensors)
                return loss, {name: gradient.clone() for name, gradient in gradients.items()}
            finally:
                worker.close()

    def _restore(self) -> None:
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                buffer.copy_(self._buffers[name])
