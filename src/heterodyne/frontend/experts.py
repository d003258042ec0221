"""Mixtures of experts found in a traced graph, each put into one op (`heterodyne.experts`).

Transformers writes a mixture out in some twenty ops: the choices are sorted by expert, two grouped products are taken, and the rows are
sorted back; or each choice takes the matrices of its expert out of all of them. None of these ops says what is true of all together:
that a token is treated by itself, and that it is multiplied with the matrices of its own experts alone. The one op does, so experts can be
cut, and the tokens can go to them.

What is recognised is exactly that. Where an op, a shape or an order is another (biases, interleaved or transposed weights,
experts of another form), the graph stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from heterodyne.experts import ACTIVATIONS
from heterodyne.frontend.annotations import read_annotations
from heterodyne.frontend.arguments import argument, mutates, operator_name
from heterodyne.frontend.export import Traced
from heterodyne.frontend.flat_graph import is_op, region_of, tensors_of
from heterodyne.frontend.sizes import spec_of

__all__ = ["put_together"]


def put_together(traced: Traced) -> Traced:
    """With one op in the place of each mixture of experts that is recognised. The graph itself is changed."""
    for last in traced.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList):
        mixture = _recognised(last)
        if mixture is not None:
            _replace(traced.graph, mixture)
    ops = tuple(node for node in traced.graph.nodes if is_op(node))
    return replace(traced, ops=ops, annotations=read_annotations(ops))


# ---- what mixtures look like ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Any:
    """Whatever stands here; the same wherever it has the same name. Without a name, anything."""

    name: str = ""


@dataclass(frozen=True)
class _Call:
    """A call of an operator (one of several) with these arguments; those that are not named are as they are by default.

    ``name``: calls of one name are the same node. ``freely``: other arguments may be anything.
    """

    operators: tuple[str, ...]
    arguments: tuple[Any, ...]
    name: str = ""
    freely: bool = False


@dataclass(frozen=True)
class _Output:
    """One of several outputs of a call."""

    of: _Call
    place: int


def _call(operator: str, *arguments: Any, name: str = "", freely: bool = False) -> _Call:
    return _Call((operator,), arguments, name, freely)


_GATE_UP, _DOWN, _K = _Any("gate_up"), _Any("down"), _Any("k")
_CHOSEN: Final = _call("reshape", _Any("indices"), [-1])
_TANH: Final = "_tanh"  # the other form of gelu, which is an argument of its operator
_ACTIVATIONS: Final = tuple(name for name in ACTIVATIONS if not name.endswith(_TANH))


def _gated(inner: _Call) -> _Call:
    """activation(gate) * up"""
    both = _call("chunk", inner, 2, -1, name="gate and up")
    activated = _Call(_ACTIVATIONS, (_Output(both, 0),), name="activation", freely=True)
    return _call("mul", activated, _Output(both, 1))


def _sum_of_choices(rows: _Call) -> _Call:
    """Rows in order of token, [N k, H], to the sum over the choices of each, [N, H]."""
    return _call("sum", _call("view", rows, _Any(), name="choices"), [1], name="sum")


def _grouped() -> _Call:
    """The rows sorted by expert (``experts_implementation="grouped_mm"``, which is what Transformers does by default)."""
    ordered = _call("sort", _CHOSEN, name="sort")
    order = _Output(ordered, 1)
    counts = _call("histc", _call("to", _Output(ordered, 0), _Any()), _Any("experts"), 0, _Any("last"))
    ends = _call("cumsum", counts, 0, torch.int32, name="ends")

    def product(rows: Any, matrices: _Any) -> _Call:
        transposed = _call("transpose", matrices, -2, -1)
        return _Call(("grouped_mm_fallback", "_grouped_mm"), (_call("to", rows, _Any("dtype")), transposed, ends))

    rows = _call("index", _Any("tokens"), [_call("floor_divide", order, _K)])
    made = product(_gated(product(rows, _GATE_UP)), _DOWN)
    weights = _call("unsqueeze", _call("index", _call("reshape", _Any("weights"), [-1]), [order]), -1)
    back = _call(
        "index_put_", _call("empty_like", order, freely=True), [order], _call("arange", _Any("rows"), freely=True)
    )
    return _sum_of_choices(_call("index", _call("mul", made, weights), [back]))


def _batched() -> _Call:
    """Each choice with matrices of its own (``experts_implementation="batched_mm"``)."""

    def product(rows: _Call, matrices: _Any) -> _Call:
        of_rows = _call("index", matrices, [_CHOSEN])
        return _call("squeeze", _call("bmm", of_rows, _call("unsqueeze", rows, -1)), -1)

    rows = _call("repeat_interleave", _Any("tokens"), _K, 0)
    made = product(_gated(product(rows, _GATE_UP)), _DOWN)
    weights = _call("unsqueeze", _call("reshape", _Any("weights"), [-1]), -1)
    return _sum_of_choices(_call("mul", made, weights))


_FORMS: Final = (_grouped(), _batched())


# ---- whether something looks like that ------------------------------------------------------------------------------


@dataclass
class _Found:
    """What stands where a form names something, and the nodes that make it up."""

    named: dict[str, Any] = field(default_factory=dict)
    nodes: set[fx.Node] = field(default_factory=set)

    def fits(self, form: Any, value: Any) -> bool:
        if isinstance(form, _Any):
            return not form.name or self._same(form.name, value)
        if isinstance(form, _Call):
            return isinstance(value, fx.Node) and self._fits_call(form, value)
        if isinstance(form, _Output):
            return isinstance(value, fx.Node) and self._fits_output(form, value)
        if isinstance(form, list):
            return (
                isinstance(value, list | tuple)
                and len(value) == len(form)
                and all(self.fits(f, v) for f, v in zip(form, value, strict=True))
            )
        return type(form) is type(value) and bool(form == value)  # True is not 1

    def _fits_output(self, form: _Output, node: fx.Node) -> bool:
        if node.target is not operator.getitem or node.args[1] != form.place or not self.fits(form.of, node.args[0]):
            return False
        self.nodes.add(node)
        return True

    def _fits_call(self, form: _Call, node: fx.Node) -> bool:
        if not isinstance(node.target, OpOverload):
            return False
        if operator_name(node) not in form.operators or (form.name and not self._same(form.name, node)):
            return False
        for place, declared in enumerate(node.target._schema.arguments):
            given = argument(node, declared.name)
            if place < len(form.arguments):
                if not self.fits(form.arguments[place], given):
                    return False
            elif not form.freely and given != declared.default_value:
                return False
        self.nodes.add(node)
        return True

    def _same(self, name: str, value: Any) -> bool:
        known = self.named.setdefault(name, value)
        return known is value or (not isinstance(value, fx.Node) and bool(known == value))


def _recognised(last: fx.Node) -> _Found | None:
    """The mixture whose choices are added up by ``last``."""
    for form in _FORMS:
        found = _Found()
        if found.fits(form, last) and _consistent(found) and _by_itself(found):
            return found
    return None


def _consistent(found: _Found) -> bool:
    """Return whether shapes and dtypes are those of a mixture; takes in the conversion of the result to the dtype of the tokens."""
    named = found.named
    roles = ("tokens", "indices", "weights", "gate_up", "down", "choices")
    values = [value for role in roles if isinstance(value := _value(named[role]), Tensor)]
    if len(values) < len(roles):
        return False
    tokens, indices, weights, gate_up, down, choices = map(spec_of, values)
    if (len(tokens.shape), len(indices.shape), len(gate_up.shape), len(down.shape)) != (2, 2, 3, 3):
        return False
    (count, width), (experts, _, _), inner = tokens.shape, gate_up.shape, down.shape[2]
    k = indices.shape[1]
    shaped = (
        indices.shape == weights.shape == (count, k)
        and choices.shape == (count, k, width)
        and gate_up.shape == (experts, inner * 2, width)
        and down.shape == (experts, width, inner)
        and k(1) == named["k"]
    )
    counted = "experts" not in named or experts(1) == named["experts"] == named["last"] + 1
    computed = str(named.get("dtype", values[0].dtype)).removeprefix("torch.")
    return shaped and counted and computed == gate_up.dtype == down.dtype and _ends(found, values[0].dtype)


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _ends(found: _Found, dtype: torch.dtype) -> bool:
    """The result has the dtype of the tokens: by a conversion, which is then the last op, or of itself."""
    last = found.named["sum"]
    users = list(last.users)
    if len(users) == 1 and found.fits(_call("to", _Any("sum"), dtype), users[0]):
        last = users[0]
    found.named["last op"] = last
    return bool(last.meta["val"].dtype is dtype)


def _by_itself(found: _Found) -> bool:
    """Return whether nobody else reads what is made on the way, and nothing is changed meanwhile.

    Under autocast each op has a dtype of its own, so there they stay.
    """
    last: fx.Node = found.named["last op"]
    region = region_of(last)
    if any(region_of(node) != region for node in found.nodes) or (region.autocast is not None and region.autocast[2]):
        return False
    if any(user not in found.nodes for node in found.nodes if node is not last for user in node.users):
        return False
    return not any(mutates(node) for node in _between(found, last) if node not in found.nodes)


def _between(found: _Found, last: fx.Node) -> Iterable[fx.Node]:
    """The nodes from the first of a mixture to its last."""
    waiting = set(found.nodes)
    node = last
    while waiting:
        waiting.discard(node)
        yield node
        node = node.prev


# ---- putting it together --------------------------------------------------------------------------------------------


def _replace(graph: fx.Graph, found: _Found) -> None:
    last: fx.Node = found.named["last op"]
    operands = tuple(found.named[role] for role in ("tokens", "indices", "weights", "gate_up", "down"))
    with graph.inserting_before(last):
        made = graph.create_node(
            "call_function", torch.ops.heterodyne.experts.default, (*operands, _activation(found)), name="experts"
        )
    made.meta = dict(last.meta)
    last.replace_all_uses_with(made)
    for node in reversed(list(graph.nodes)):
        # Sizes go with them, if nothing else reads them: two mixtures may share some.
        size = node.op == "call_function" and not node.users and not tensors_of(node)
        if node in found.nodes or size:
            graph.erase_node(node)


def _activation(found: _Found) -> str:
    node: fx.Node = found.named["activation"]
    return operator_name(node) + (_TANH if argument(node, "approximate") == "tanh" else "")
