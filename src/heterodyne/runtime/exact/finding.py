"""How one form of a model differs from one plain call of it: by how much, in which gradients; and that in words, with a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from heterodyne.graph.ir import ModelGraph
from heterodyne.model_output import LOSS

__all__ = ["Finding", "Form", "needs_graph", "words_of"]

_MOST_LINES = 4

_PARTS_REMEDY = (
    "Parts must add up to the whole: let each sample have a loss of its own that reads no other sample, its place in the batch or the "
    "batch size, and let the loss be their sum, their mean, or a sum over the batch divided by a sum over the batch."
)
_EMPTY_REMEDY = (
    "The first part counts nothing in the loss, and the loss has a part that does not follow from what counts: let samples that count "
    "nothing add nothing, or divide by the number of samples."
)
_STATE_REMEDY = "The loss agrees: look for a hook that is not linear in the gradient, or a counter in Python."
_CUT_REMEDY = (
    "An op there means more than its name says: the backward of a custom autograd.Function, or a hook on a tensor or a module, is not "
    "in the graph. Write x + (f(x) - x).detach() for another forward, x.detach() for no backward, and 2 * x.detach() - x for a "
    "reversed one"
)
_AS_IT_IS = "let plans run the module as it is, with the strategy 'data'"

Form = Literal["parts", "cut"]
"""``parts``: the module, fed in parts of the batch (where samples see each other in the loss: the graph in their place, in one part).
``cut``: the captured graph in two stages, fed in the same parts."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """How far one form of the model is from one plain call.

    Args:
        parts: samples of each part of the batch.
        empty_first: the first part counts nothing in the loss.
        losses: of the form, and of the plain call.
        loss_error: relative.
        errors: of each gradient, relative, in the order in which the forward reads the parameters.
        largest: of all errors.
        beyond: the parameters whose errors are more than rounding, in the same order; ``loss`` is one of them if its error is.
        woken: buffers and entries of the batch that are zero, and were not for this comparison.
        failure: the words of what was raised, where it does not run at all.
    """

    form: Form
    parts: tuple[int, ...]
    empty_first: bool = False
    losses: tuple[float, float] = (0.0, 0.0)
    loss_error: float = 0.0
    errors: Mapping[str, float] = field(default_factory=dict)
    largest: float = 0.0
    beyond: tuple[str, ...] = ()
    woken: tuple[str, ...] = ()
    failure: str = ""

    @property
    def agrees(self) -> bool:
        return not self.beyond and not self.failure

    @property
    def all_errors(self) -> list[tuple[str, float]]:
        """The error of the loss, and of each gradient."""
        return [(LOSS, self.loss_error), *self.errors.items()]


def needs_graph(graph: ModelGraph) -> bool:
    """Return whether every plan runs the captured graph, for the loss of the module itself would be that of a part."""
    return graph.loss.reduction in ("terms", "coupled")


def words_of(finding: Finding, graph: ModelGraph) -> str:
    """Return what differs and by how much, the lines of the model, and a way out. Raises nothing; the finding must disagree."""
    parts = f" in parts of {_list(finding.parts)}" if len(finding.parts) > 1 else ""
    woken = f", with small values in place of the zeros of {', '.join(finding.woken)}" if finding.woken else ""
    fed = f"fed {sum(finding.parts)} samples{parts}{woken}"
    if finding.form == "parts" and not needs_graph(graph):
        told = f"{graph.name} gives something else when it is {fed} than in one piece"
        return f"{told}: {_what(finding, graph)} {_remedy(finding)}"
    cut = "cut in two and " if finding.form == "cut" else ""
    remedy = _CUT_REMEDY if needs_graph(graph) else f"{_CUT_REMEDY}, or {_AS_IT_IS}"
    return f"The captured graph of {graph.name}, {cut}{fed}, is not the module: {_what(finding, graph)} {remedy}."


def _remedy(finding: Finding) -> str:
    if finding.failure:
        return "A model must take any number of samples."
    if "loss" not in finding.beyond:
        return _STATE_REMEDY
    return _EMPTY_REMEDY if finding.empty_first else _PARTS_REMEDY


def _what(finding: Finding, graph: ModelGraph) -> str:
    if finding.failure:
        return f"it fails with {finding.failure}."
    found, expected = finding.losses
    ratio = f", {found / expected:.3g} times as much" if expected and "loss" in finding.beyond else ""
    loss = f"the loss{_line_of_loss(graph)} is {found:.6g} and should be {expected:.6g}{ratio}"
    if "loss" not in finding.beyond:
        loss = f"the loss agrees ({finding.loss_error:.1g})"
    wrong = [name for name in finding.errors if name in finding.beyond]
    if not wrong:
        return f"{loss}, and so do all gradients."
    first = f"{_place(wrong[0], graph)} by {finding.errors[wrong[0]]:.2g} of its norm"
    told = f"{loss}; {len(wrong)} of {len(finding.errors)} gradients differ, in the order of the forward first that of {first}"
    return f"{told}{_border(finding, wrong, graph)}."


def _border(finding: Finding, wrong: list[str], graph: ModelGraph) -> str:
    """Name the ops among which the fault is, where the wrong gradients are all of those before some op."""
    names = list(finding.errors)
    if len(wrong) == len(names) or names[: len(wrong)] != wrong:
        return ""
    first = next(place for place, op in enumerate(graph.ops) if names[len(wrong)] in op.parameters)
    last = max((place for place, op in enumerate(graph.ops[:first]) if wrong[-1] in op.parameters), default=0)
    between = {op.source: op.kind for op in graph.ops[last + 1 : first] if op.source}
    lines = [f"{source} ({kind})" for source, kind in between.items()]
    told = "; ".join(lines[:_MOST_LINES]) + (
        f" and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    )
    return (
        f", last {_place(wrong[-1], graph)}; those from {_place(names[len(wrong)], graph)} on agree"
        f"{f', so look between them: {told}' if told else ''}"
    )


def _line_of_loss(graph: ModelGraph) -> str:
    op = None if graph.output is None else graph.op_by_name.get(graph.output.name)
    return "" if op is None or not op.source else f" ({op.source})"


def _place(name: str, graph: ModelGraph) -> str:
    """A parameter with the line of the op that first reads it."""
    op = next((op for op in graph.ops if name in op.parameters), None)
    return name if op is None or not op.source else f"{name} ({op.source})"


def _list(parts: tuple[int, ...]) -> str:
    told = list(map(str, parts))
    return " and ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)
