"""BatchNorm: the one op inside of a model that may take statistics over the samples, for the runtime takes them over all devices."""

from __future__ import annotations

from torch import fx, nn

from heterodyne.errors import CaptureError
from heterodyne.frontend.arguments import argument, operator_name
from heterodyne.frontend.export import Traced
from heterodyne.frontend.faults import line_of
from heterodyne.frontend.flat_graph import tensors_of
from heterodyne.frontend.sizes import degree, size_of

__all__ = ["batch_statistics", "is_batch_norm", "refuse_own_exchange"]

_SERVED = "batch_norm"  # what torch.nn.functional.batch_norm and torch.batch_norm call


def is_batch_norm(node: fx.Node) -> bool:
    """Return whether an op is BatchNorm in one of its forms, in training or not."""
    return _SERVED in operator_name(node)


def batch_statistics(traced: Traced) -> tuple[str, ...]:
    """Names of the ops that normalise over the micro-batch.

    Raises CaptureError, with the line, for one that the runtime does not serve, and for one whose channels belong to the samples.
    """
    return tuple(node.name for node in traced.ops if is_batch_norm(node) and _takes_statistics(node))


def refuse_own_exchange(model: nn.Module) -> None:
    """Raise CaptureError, with its name, for a SyncBatchNorm in training: it would meet ranks that run other micro-batches, or none."""
    for path, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise CaptureError(
                f"{path!r} of {type(model).__name__} is a SyncBatchNorm, which exchanges statistics with all ranks by itself, also "
                "with those that do other work. Take BatchNorm1d, 2d or 3d in its place (leave convert_sync_batchnorm out): its "
                "statistics are those of all replicas under any plan"
            )


def _takes_statistics(node: fx.Node) -> bool:
    if argument(node, "training") is False:
        return False
    place = f"{line}\n" if (line := line_of(node, full=True)) else ""
    if operator_name(node) != _SERVED:
        raise CaptureError(
            f"{place}{node.target} takes statistics over the samples of a batch in a form that cannot be taken over all devices. Call "
            "torch.nn.functional.batch_norm, or use nn.BatchNorm."
        )
    source = argument(node, "input")
    (value,) = tensors_of(source)
    if degree(value) > 0 and not size_of(value.shape[1]).is_constant:
        raise CaptureError(
            f"{place}{node.target} has channels (dim 1) that belong to samples of the batch, and BatchNorm takes its statistics over the "
            "samples of all devices. For statistics of each sample by itself write torch.nn.functional.instance_norm(x) or group_norm, "
            "with the samples in dim 0."
        )
    return True
