"""Samples that see each other: what no weighting of the parts of a batch can serve, since each device has its own samples.

The shapes show it. An op that reads samples, and gives one thing for all of them, something for each pair, or a number of things
that is not in proportion to theirs, has mixed them; so has one that works along the dim in which the samples are. What the
loss itself sums over the samples is known by then (``passed``), and BatchNorm is served by the runtime.

Shapes do not show rows that are taken or written by number (``h[at]``): the numbers come from the data, and count the samples of a whole
batch. An op that numbers rows of samples is one in which they see each other, unless the numbers are known to be a sample's own.

Integers and truth values may be reduced over the samples, or compared for each pair of them, as long as nothing is computed from
the result: the greatest length of a batch, or whether any sample has a flag, is one value of all samples (``common``), and the samples of
another device would have had another. It is followed until an op computes with it. Integers may also be sorted along the samples:
rows are put in order of expert, and back, which no row notices, and a count of the rows of each expert says where the rows of the next
begin. A row's place among those of all samples is another matter: who comes too late for the capacity of an expert depends on who
else is there.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor, fx

from heterodyne.errors import CaptureError
from heterodyne.frontend.along import SORTS, runs_along_the_samples, works_along_the_samples
from heterodyne.frontend.arguments import argument, leading_to, mutates, operator_name
from heterodyne.frontend.batch_statistics import is_batch_norm
from heterodyne.frontend.batch_values import BatchValues, batch_values, with_bases
from heterodyne.frontend.export import Traced
from heterodyne.frontend.faults import line_of
from heterodyne.frontend.flat_graph import tensors_of
from heterodyne.frontend.numbered_rows import NumberedRows, numbered_rows
from heterodyne.frontend.row_places import Dependence
from heterodyne.frontend.sample_order import Samples, samples_in
from heterodyne.frontend.sizes import degree, proportional, size_of
from heterodyne.frontend.sizes_as_values import follows
from heterodyne.graph.op_kinds import CASTS, COPIES, EXPANDS, RESHAPES, SQUEEZES

__all__ = ["CoupledError", "computed_with", "coupled", "couplings", "mixed", "refuse_coupling", "refuse_sizes"]

_ELEMENTWISE = frozenset({
    "add", "add_", "addcmul", "div", "div_", "l1_loss", "maximum", "minimum", "mse_loss", "mul", "mul_", "sub", "sub_", "where",
})  # fmt: skip
_KEEPS = COPIES | CASTS | RESHAPES | SQUEEZES | EXPANDS
_PUTS = frozenset({"index_put", "index_put_", "scatter", "scatter_"})
_COMPARES = frozenset({"lt", "le", "gt", "ge"})


class CoupledError(CaptureError):
    """Samples see each other, or the loss is no quotient of sums over them: no weights of the parts of a batch make up the whole."""


_COUNTING = frozenset({"histc"})  # returns floats that are whole numbers
# An argument that says which of the sorted rows meet which matrix, of an op that treats each row by itself.
_ROWS_OF_GROUPS = frozenset({"offs"})


def refuse_coupling(traced: Traced, passed: Collection[fx.Node]) -> None:
    """Raise, with the line, if a part of the batch would have another loss than it has in the whole batch.

    Args:
        passed: nodes that the reader of the loss takes care of.

    Raises CoupledError for samples that see each other, CaptureError for numbers and places of samples as values.
    """
    for _, error in couplings(traced, passed):
        raise error
    refuse_sizes(traced, [traced.loss], passed)


def refuse_sizes(traced: Traced, results: Iterable[fx.Node], passed: Collection[fx.Node]) -> None:
    """Raise CaptureError, with the line, if results depend on the number of the samples or on their places."""
    values = batch_values(traced, known=passed)
    for node in leading_to(results):
        if node.op == "call_function":
            _refuse_size(node, values, passed)


def couplings(traced: Traced, passed: Collection[fx.Node]) -> Iterator[tuple[fx.Node, CoupledError]]:
    """The ops on the way to the loss that let the samples see each other, and what to say of each."""
    places = _places(traced)
    in_order = _in_order(traced)
    values = batch_values(traced, known=passed)
    of_samples = values.samples | values.random
    order = samples_in(traced.graph)
    common = _common(traced, of_samples)
    for node in leading_to([traced.loss]):
        name = operator_name(node)
        if node.op != "call_function" or is_batch_norm(node) or name in _COUNTING:
            continue
        if (numbered := _of_others(node, values, in_order)) is not None:
            yield node, _by_number(node, numbered)
        if node not in of_samples:
            continue
        tensors = [tensor for tensor in tensors_of(node) if _is_continuous(tensor)]
        read = [t for n in node.all_input_nodes if n in of_samples for t in tensors_of(n) if _is_continuous(t)]
        reads_samples = any(degree(tensor) > 0 for tensor in read)
        one_for_all = reads_samples and node not in passed and any(degree(tensor) == 0 for tensor in tensors)
        along = works_along_the_samples(node)
        if along and not tensors:
            yield node, _counted(node, "goes along the samples of a batch")
        elif along or one_for_all or any(mixed(tensor) for tensor in tensors) or _joins_others(node, order):
            yield node, coupled(node)
        elif name in _COMPARES and places.intersection(node.all_input_nodes):
            yield node, _counted(node, "compares places in the order of all samples")
        elif tensors and (
            causes := [common[n] for n in computed_with(node) if n in common and not {n, node} <= set(passed)]
        ):
            yield node, _of_all(causes[0], node)


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _refuse_size(node: fx.Node, values: BatchValues, passed: Collection[fx.Node]) -> None:
    """Refuse what a part of the batch computes from its own number of samples, or from their places in it: the whole batch has others."""
    found = values.dependent.get(node)
    if found is None and node in passed:
        found = next((Dependence(on="place", cause=n) for n in node.all_input_nodes if n in values.places), None)
    if found is None:
        return
    place = f"{line}\n" if (line := line_of(found.cause, full=True)) else ""
    if found.on == "size":
        raise CaptureError(
            f"{place}{found.cause.target} computes with the number of samples in the batch, and the devices each see only a part of "
            "them, so its result would follow the plan. Give the model a constant when it is built; where the loss is averaged, "
            "divide only in its last step (.mean(), or .sum() / x.shape[0])."
        )
    raise CaptureError(
        f"{place}{found.cause.target} computes with the places of the samples in the batch, and the devices each number their own samples "
        "from 0. Pass such numbers as an input of the batch, one a sample. torch.arange(x.shape[0]) may only choose a sample's own row, "
        "as in hidden[torch.arange(x.shape[0]), last]; where each sample has n rows of its own, say that none is beyond them: "
        "hidden.flatten(0, 1)[last.clamp(0, n - 1) + n * torch.arange(x.shape[0])]."
    )


def coupled(node: fx.Node) -> CoupledError:
    """Return what to say of an op that lets them see each other."""
    place = f"{line}\n" if (line := line_of(node, full=True)) else ""
    return CoupledError(
        f"{place}samples see each other: {node.target} makes the samples of a batch depend on each other, and the devices each see only "
        "their own samples. Average over the samples only in the loss; BatchNorm is the one exception inside of a model. A loss that "
        "compares samples (contrastive, in-batch negatives) is exact if no weights of the model come after the comparison.\n"
    )


def _common(traced: Traced, of_samples: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The values that all samples make together (one for all, or something for each pair), and the op that made each of them so."""
    found: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op != "call_function" or node not in of_samples or not tensors_of(node):
            continue
        cause = next((found[n] for n in computed_with(node) if n in found), None)
        if cause is None and _made_of_all(node, of_samples):
            cause = node
        if cause is not None:
            found.update(dict.fromkeys((node, *(n for written in mutates(node) for n in with_bases(written))), cause))
    return found


def _made_of_all(node: fx.Node, of_samples: Collection[fx.Node]) -> bool:
    """Return whether a tensor has no rows for the samples that it was made of, or some for each pair of them."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return False  # each of several outputs for itself
    source = node.args[0] if node.target is operator.getitem else node
    read = source.all_input_nodes if isinstance(source, fx.Node) else []
    of_all = any(n in of_samples and any(degree(tensor) > 0 for tensor in tensors_of(n)) for n in read)
    return of_all and (degree(value) == 0 or mixed(value))


def computed_with(node: fx.Node) -> list[fx.Node]:
    """The tensors whose values an op computes with."""
    rows = {id(argument(node, name)) for name in _ROWS_OF_GROUPS}
    return [n for n in node.all_input_nodes if id(n) not in rows]


def _of_all(cause: fx.Node, node: fx.Node) -> CoupledError:
    """Return what to say of a value that all samples make together, and of where it is computed with."""
    place = f"{line}\n" if (line := line_of(cause, full=True)) else ""
    used = line_of(node)
    where = f" (in {used})" if used and used != line_of(cause) else ""
    return CoupledError(
        f"{place}samples see each other: {cause.target} makes one value of all samples of a batch, {node.target} computes with it{where}, "
        "and the devices each see only their own samples, so it would be another value there. Compute it for each sample by itself, as in "
        ".amax(1) or .any(1), pass it as an input of the batch with one entry for each sample, or give the model a constant.\n"
    )


def _in_order(traced: Traced) -> set[fx.Node]:
    """Integers that are computed from the order of rows: rows are put in order of expert, and back, which no row notices."""
    found: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op != "call_function" or any(_is_continuous(tensor) for tensor in tensors_of(node)):
            continue
        made = node.args[0] if _is_order(node) else node
        sorts = isinstance(made, fx.Node) and operator_name(made) in SORTS and runs_along_the_samples(made)
        if found.intersection(node.all_input_nodes) or (sorts and isinstance(node.meta["val"], Tensor)):
            found.update((node, *mutates(node)))
    return found


def _of_others(node: fx.Node, values: BatchValues, in_order: Collection[fx.Node]) -> NumberedRows | None:
    """Rows of samples that an op takes or writes by numbers which may be those of other samples."""
    for numbered in numbered_rows(node):
        differ = values.samples | values.random | values.places.keys()
        bags = numbered.index is argument(node, "offsets")  # one ends where that of the next sample begins
        if (
            (follows(numbered.index) if bags else numbered.follows)
            and (bags or numbered.written or numbered.source in differ)
            and numbered.index not in values.places
            and numbered.index not in values.dependent
            and numbered.index not in in_order
        ):
            return numbered
    return None


def _by_number(node: fx.Node, numbered: NumberedRows) -> CoupledError:
    """Return what to say of an op that numbers rows of other samples."""
    place = f"{line}\n" if (line := line_of(node, full=True)) else ""
    does = "writes" if numbered.written else "takes"
    return CoupledError(
        f"{place}samples see each other: {node.target} {does} rows of the batch by their numbers, and the devices each number the rows of "
        "their own samples from 0. Keep what belongs together in one sample, in a dim of its own ([batch, rows, ...]), and number its rows "
        "there, as in h.gather(1, at). A loss that compares samples is exact if no weights of the model come after the comparison.\n"
    )


def _counted(node: fx.Node, what: str) -> CoupledError:
    """Return what to say of whole numbers that tell of a sample how many others there are."""
    place = f"{line}\n" if (line := line_of(node, full=True)) else ""
    return CoupledError(
        f"{place}{node.target} {what}, and the devices each see only their own samples, so it would find others than on one device. Let "
        "each sample count for itself: keep the samples in a dim of their own, [samples, tokens, ...], and count along the tokens (so has "
        "each sample a capacity of its own, where experts have one)."
    )


def _places(traced: Traced) -> set[fx.Node]:
    """Numbers that tell where a row stands among those of all samples: the order of an order, or what is written at its places."""
    orders: set[fx.Node] = set()
    found: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op != "call_function" or any(tensor.is_floating_point() for tensor in tensors_of(node)):
            continue
        name = operator_name(node)
        # What is taken at a place says nothing of its number.
        numbering = {n.index for n in numbered_rows(node) if not n.written}
        read = set(node.all_input_nodes) - numbering
        sorts = name in SORTS and runs_along_the_samples(node)
        if read & found or ((sorts or name in _PUTS) and read & orders):
            found.update((node, *mutates(node)))
        elif sorts or (read & orders and (name in _KEEPS or _is_order(node))):
            orders.add(node)
    return found


def _is_order(node: fx.Node) -> bool:
    """Return whether it is the second of what ``sort`` returns; the first is what was sorted."""
    return node.target is operator.getitem and bool(node.args[1] == 1)


def _joins_others(node: fx.Node, order: Mapping[fx.Node, Samples]) -> bool:
    """Return whether a row holds elements of several samples, or is joined with a row of another sample."""
    if node in order and order[node].mixed:
        return True
    if operator_name(node) not in _ELEMENTWISE:
        return False
    read = [(n, order[n]) for n in node.all_input_nodes if n in order and order[n].groups and not order[n].made]
    places = {(at.dim - n.meta["val"].dim(), at.rows, at.groups) for n, at in read if at.dim is not None}
    return len({place[:2] for place in places}) < len(places)


def mixed(tensor: Tensor) -> bool:
    """Something for each pair of samples, or one sample more or less than there are."""
    sizes = [size_of(size) for size in tensor.shape]
    return degree(tensor) > 1 or any(not size.is_constant and not proportional(size) for size in sizes)
