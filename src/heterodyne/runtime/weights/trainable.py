"""Which of a module's parameters the captured graph trains."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from heterodyne.errors import CaptureError, PlanError
from heterodyne.graph.ir import ModelGraph

__all__ = ["forward_order", "require_none_unfrozen", "require_trained", "trainable_parameters"]


def trainable_parameters(module: nn.Module, graph: ModelGraph) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by the graph's names, in the module's order. Raises PlanError if the two do not agree."""
    by_name = dict(module.named_parameters(remove_duplicate=False))
    trained = [entry.name for entry in graph.parameters if entry.trainable]
    unknown = [name for name in trained if name not in by_name]
    known = {id(by_name[name]) for name in trained if name in by_name}
    forgotten = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in known]
    if unknown or forgotten:
        raise PlanError(
            "the model is not the one that was captured: "
            + "; ".join(
                f"{what} {', '.join(names[:5])}"
                for what, names in (("it lacks", unknown), ("the capture lacks", forgotten))
                if names
            )
            + ". Capture the model again after changing which parameters it has or trains"
        )
    name_of = {id(by_name[name]): name for name in trained}
    return {name_of[id(p)]: p for p in module.parameters() if id(p) in name_of}


def forward_order(module: nn.Module, graph: ModelGraph) -> dict[str, int]:
    """The trained parameters, numbered as the forward first reads them; those that no op names come last, as the module has them."""
    read = [name for op in graph.ops for name in op.parameters]
    return {name: number for number, name in enumerate(dict.fromkeys([*read, *trainable_parameters(module, graph)]))}


def require_none_unfrozen(module: nn.Module, trained: Mapping[str, nn.Parameter], known: Collection[str]) -> None:
    """Raises PlanError if a parameter is trained now that was frozen, or not there, when buckets and optimizer were made (``trained``;
    ``known``: the names of all that were there)."""
    late = [name for name, p in module.named_parameters() if p.requires_grad and name not in trained]
    new = [name for name in late if name not in known]
    before = {id(parameter): name for name, parameter in trained.items()}
    moved = [
        f"{name} (was {before[id(p)]})" for name, p in module.named_parameters() if name in late and id(p) in before
    ]
    if moved:
        raise PlanError(
            f"{', '.join(moved[:5])}: modules were put into others since the trainer was made; plan, optimizer state and checkpoints go "
            "by the names of parameters. Give the model that form before it is distributed (a place for what comes later can be an "
            "nn.Identity, whose successor has no weights), or close the trainer and distribute the model as it is now"
        )
    renamed = [name for name in late if name.rpartition(".")[2] not in {known.rpartition(".")[2] for known in trained}]
    if renamed:
        raise PlanError(
            f"{', '.join(renamed[:5])}: no parameter of that name was there when the trainer was made, as after pruning, weight_norm or a "
            "parametrization that is added in the middle of a run. Close the trainer, and distribute the model as it is now"
        )
    if new:
        raise PlanError(
            f"{', '.join(new[:5])}: not in the model when the trainer was made, or a weight of another name. Plan, gradient buckets "
            "and optimizer are made for the weights that are there at first. Close the trainer, and distribute the model as it is now"
        )
    if late:
        raise PlanError(
            f"{', '.join(late[:5])}: not trained when the trainer was made, and requires_grad now. No gradient would reach "
            f"{'it' if len(late) == 1 else 'them'}: plan, gradient buckets and optimizer are made for what is trained at first. "
            "Distribute the model with requires_grad on all that is ever trained, and freeze the rest after that "
            "(parameter.requires_grad_(False) between steps is followed)"
        )


def require_trained(graph: ModelGraph) -> None:
    """Raise CaptureError if a step would train nothing: no gradient flows from the loss, or every parameter is frozen.

    A custom autograd.Function may have torch.no_grad in its forward, through which the graph has no gradients and the module has.
    """
    if not any(parameter.trainable for parameter in graph.parameters):
        raise CaptureError(f"a step trains nothing: every parameter of {graph.name} is frozen (requires_grad is False)")
    if graph.output is not None and not graph.module_only and not graph.flows(graph.output):
        raise CaptureError(
            f"a step trains nothing: no gradient flows from the loss of {graph.name} to a parameter that is trained. Look for .detach(), "
            "torch.no_grad(), or a loss of integers or of argmax"
        )
