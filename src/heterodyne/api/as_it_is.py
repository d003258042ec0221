"""A model that torch.export gives no graph of: it is trained by data parallelism, as it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from heterodyne.api.session import Session
from heterodyne.around_model import functions_of
from heterodyne.errors import CaptureError, HeterodyneError, NoGraphError
from heterodyne.frontend import Captured, Opaque, opaque, read_count
from heterodyne.frontend.changes import Looked
from heterodyne.frontend.faults import user_line
from heterodyne.frontend.left_behind import LeftBehind, set_anew
from heterodyne.frontend.loss_alone import has_loss_outside, output_of_model, trace_loss
from heterodyne.frontend.opaque import CountGiven, Recount
from heterodyne.graph.ir import Loss
from heterodyne.job import Strategy
from heterodyne.loss_count import LossCount
from heterodyne.plan.capabilities import CUTTING, FEATURES
from heterodyne.runtime.exact.parts import Seen, run_in_parts
from heterodyne.runtime.slices import as_source
from heterodyne.runtime.stages.forward import Precision

Result = TypeVar("Result")

__all__ = ["AsItIs", "capture_as_it_is", "require_same_count"]


@dataclass(frozen=True, kw_only=True)
class AsItIs:
    """What it takes to train a model without a graph of it.

    Args:
        build: a copy of the model with weights on a device.
        loss_count: what its loss divides by, as the user says; None: that is found, or refused.
        strategy: what was asked for.
    """

    build: Callable[[torch.device], nn.Module]
    loss_count: CountGiven | None = None
    strategy: Strategy = "auto"
    precision: Precision = "fp32"


def capture_as_it_is(
    session: Session,
    model: nn.Module,
    example_batch: Mapping[str, Tensor],
    wanted: AsItIs,
    error: NoGraphError,
    name: str,
    shared: Collection[str] = (),
) -> Opaque:
    """Take the model in one piece, once its parts have added up on rank 0. Collective. ``shared``: inputs that all samples share.

    Raises CaptureError if a plan was asked for that needs a graph, if nothing says what the loss divides by, or if the module on parts of
    the example is not what it is on all of it.
    """
    if wanted.strategy in CUTTING:
        how = FEATURES[CUTTING[wanted.strategy]].name
        raise CaptureError(
            f"{error}\nThe strategy {wanted.strategy!r} cuts the model ({how}), which takes a graph of it. Take the strategy 'data', "
            "in which every device runs the module as it is, or change this line"
        )
    loss, count, recount = _loss_of(session, model, example_batch, wanted, error, shared)

    def captured(seen: Seen, left: Sequence[LeftBehind] = ()) -> Opaque:
        return opaque(
            model,
            example_batch,
            reason=error.reason,
            loss=loss,
            count=count,
            random=seen.random,
            batch_norm=seen.batch_norm,
            name=name,
            recount=recount,
            shared=shared,
            left=left,
        )

    session.say(
        f"{name} cannot be captured: {error.reason}. Data parallelism only: every device runs the module as it is"
    )
    draft = captured(Seen(random=True, batch_norm=False))

    def in_parts(module: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Seen, list[LeftBehind]]:
        def run() -> Seen:
            return run_in_parts(
                module,
                as_source(batch, draft.graph),
                graph=draft.graph,
                loss_count=draft.loss_count,
                device=session.device,
                precision=wanted.precision,
            )

        before = Looked(module, functions_of(module))
        seen = run()
        return seen, set_anew(module, before, run)

    with session.announced("comparing the module on a few samples with itself on parts of them"):
        found = captured(*session.agreement.on_rank0(lambda: _run(in_parts, session, wanted, example_batch)))
    session.say(
        f"{name} was compared with itself in parts on the first batch, and its loss will be on some samples of a few later ones. A choice "
        "that it makes for a whole batch, and that turns out otherwise only in others, is not seen: 'heterodyne verify' compares steps of "
        "a job"
    )
    return found


def require_same_count(given: CountGiven | None, example_batch: Mapping[str, Tensor], captured: Captured) -> None:
    """Raises CaptureError if what the user says of a loss is not what its graph says."""
    if given is None:
        return
    told, known, loss = read_count(given), captured.loss_count, captured.graph.loss
    if told.loss.reduction != loss.reduction:
        raise CaptureError(
            f"loss_count says that the loss is a {told.loss.reduction}, and by its graph it is a {loss.reduction}: leave it out"
        )
    if told.counts_data:
        size = as_source(example_batch, captured.graph).size
        counted = [count.total(count.statistics(example_batch, size, {})) for count in (told, known)]
        if counted[0] != counted[1]:
            raise CaptureError(
                f"loss_count counts {counted[0]:g} in the example batch, and by its graph the loss divides by {counted[1]:g}: leave it out"
            )


def _loss_of(
    session: Session,
    model: nn.Module,
    example_batch: Mapping[str, Tensor],
    wanted: AsItIs,
    error: NoGraphError,
    shared: Collection[str],
) -> tuple[Loss, LossCount, Recount | None]:
    """As the user says, else from the graph of the loss, if that is outside of the model, and how to find it again. Collective."""
    given = session.together(lambda: None if wanted.loss_count is None else read_count(wanted.loss_count))
    if given is not None:
        return given.loss, given, None
    found = None
    if has_loss_outside(model):
        # Only rank 0 has weights for sure.
        output = session.agreement.on_rank0(lambda: _run(output_of_model, session, wanted, example_batch))
        example = {name: tensor.to("meta") for name, tensor in example_batch.items()}

        def recount(now: nn.Module) -> tuple[Loss, LossCount]:
            counted = trace_loss(now, example, output, shared)
            if counted is None:
                raise CaptureError(
                    "torch.export gives no graph of the loss as it is now, so what it divides by is not known"
                )
            return counted

        found = session.together(lambda: trace_loss(model, example_batch, output, shared))
    if found is None:
        raise CaptureError(
            f"{error}\nData parallelism can run the module as it is, once it is known what its loss divides by: pass "
            "loss=LossOptions(loss_count='samples') for a mean over samples that all count alike, 'sum' for a sum, or a function of a "
            "batch, as lambda batch: (batch['labels'] != -100).sum() (a job has model.loss_count; a loss function is passed along)"
        )
    return *found, recount


def _run(
    do: Callable[[nn.Module, Mapping[str, Tensor]], Result],
    session: Session,
    wanted: AsItIs,
    batch: Mapping[str, Tensor],
) -> Result:
    """Do something with a copy of the module and the batch, on the device. Raises CaptureError for whatever the module raises."""
    module = wanted.build(session.device)
    try:
        return do(module, {name: tensor.to(session.device) for name, tensor in batch.items()})
    except CaptureError:
        raise
    except HeterodyneError as error:
        raise CaptureError("\n".join(filter(None, [user_line(error), str(error)]))) from error
    except Exception as error:  # whatever the user's own code raises is reported as its own
        raise CaptureError(
            f"{type(module).__name__} fails on the example batch.\n{user_line(error)}\n({type(error).__name__}: {error})"
        ) from error
