"""Capture on every rank, and the same on all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from heterodyne.api.as_it_is import AsItIs, capture_as_it_is, require_same_count
from heterodyne.api.session import Session
from heterodyne.errors import CaptureError, NoGraphError
from heterodyne.frontend import Captured, CapturedModel, trace
from heterodyne.runtime.values_in_range import ValuesInRange

__all__ = ["capture_everywhere"]


def capture_everywhere(
    session: Session,
    model: nn.Module,
    example_batch: Mapping[str, Tensor],
    as_it_is: AsItIs,
    *,
    name: str | None = None,
    shared: Collection[str] = (),
) -> CapturedModel:
    """Capture on every rank, and make sure that all captured the same. A model without a graph is taken in one piece.

    ``name``: of the model, None: its class; ``shared``: inputs that all samples share. Raises CaptureError.
    """
    name = name or type(model).__name__
    with session.announced("capturing the model"):
        found = session.together(lambda: _traced(model, example_batch, as_it_is, name, shared))
    missing = [error for error in session.communicator.all_gather_object(_without_graph(found)) if error is not None]
    captured = (
        capture_as_it_is(session, model, example_batch, as_it_is, missing[0], name, shared)
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
    model: nn.Module, example_batch: Mapping[str, Tensor], as_it_is: AsItIs, name: str, shared: Collection[str]
) -> Captured | NoGraphError:
    try:
        captured = trace(model, example_batch, name=name, shared=shared)
    except NoGraphError as error:
        return error
    require_same_count(as_it_is.loss_count, example_batch, captured)
    ValuesInRange(captured.graph).require(example_batch, 0, "the example batch")
    return captured


def _without_graph(found: Captured | NoGraphError) -> NoGraphError | None:
    return NoGraphError(str(found), reason=found.reason) if isinstance(found, NoGraphError) else None
