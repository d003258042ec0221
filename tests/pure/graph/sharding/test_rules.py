"""What the table says of ops: letters that go together, sums, units, and what has to be whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from heterodyne.graph import Ref, Size
from heterodyne.graph.sharding import COPY, PARTIAL, REPLICATE, sharded
from heterodyne.graph.sharding.rule import Rule
from heterodyne.graph.sharding.rules import rule_of
from pure.graph.sharding.by_hand import B, Made


def rule(made: Made, ref: Ref) -> Rule:
    graph = made.graph()
    return rule_of(graph.op_by_name[ref.name], graph)


def letters(found: Rule) -> str:
    """As an einsum, with what is added once behind it."""
    return f"{','.join(found.operands)}->{','.join(found.outputs)}"


def one(kind: str, source: tuple[int | Size, ...], result: tuple[int | Size, ...], **arguments: object) -> Rule:
    """The rule of an op that reads one tensor."""
    made = Made()
    x = made.input(*source)
    return rule(made, made.op(kind, *result, **{"self": x, **arguments}))  # type: ignore[arg-type]  # as a test writes them


def test_a_linear_layer_is_cut_by_columns_by_rows_and_by_what_is_ahead() -> None:
    made = Made()
    x = made.input(B, 5, 6)
    found = rule(made, made.linear(x, 6, 8, bias=True))
    assert letters(found) == "abk,ok,o->abo"
    columns, rows, samples = found.strategy("o"), found.strategy("k", 1), found.strategy("a")
    assert (columns.operands, columns.outputs) == ((COPY, sharded(0), sharded(0)), (sharded(2),))
    assert (rows.operands, rows.outputs) == ((sharded(2, 1), sharded(1, 1), PARTIAL), (PARTIAL,))
    assert (samples.operands, samples.outputs) == ((sharded(0), COPY, COPY), (sharded(0),))
    assert (found.whole.operands, found.whole.outputs) == ((REPLICATE, REPLICATE, REPLICATE), (REPLICATE,))
    assert [s.operands for s in found.in_parts] == [(PARTIAL, COPY, PARTIAL)]


def test_a_weight_of_one_row_is_no_matrix() -> None:
    made = Made()
    x, row = made.input(B, 6), made.parameter(6)
    found = rule(made, made.op("linear", B, input=x, weight=row, bias=None))
    assert found.letters == ""


@pytest.mark.parametrize(
    ("left", "right", "result", "expected"),
    [
        ((B, 4, 5), (B, 5, 6), (B, 4, 6), "aIK,aKJ->aIJ"),
        ((B, 4, 5), (1, 5, 6), (B, 4, 6), "aIK,.KJ->aIJ"),
        ((B, 3, 4, 5), (3, 5, 6), (B, 3, 4, 6), "abIK,bKJ->abIJ"),
        ((B, 4, 5), (5,), (B, 4), "aIK,K->aI"),
        ((5,), (B, 5, 6), (B, 6), "K,aKJ->aJ"),
    ],
)
def test_samples_of_products_are_broadcast(left: tuple, right: tuple, result: tuple, expected: str) -> None:
    made = Made()
    x, y = made.input(*left), made.input(*right)
    found = rule(made, made.op("matmul", *result, self=x, other=y))
    assert (letters(found), found.summed) == (expected, "K")


@pytest.mark.parametrize(
    ("equation", "expected"),
    [("bij,jk->bik", "j"), ("bij, bij -> b", "ij"), ("bii,ij->bj", None), ("...j,j->...", None)],
)
def test_einsum_is_as_it_is_written(equation: str, expected: str | None) -> None:
    made = Made()
    shapes = {"bij,jk->bik": ((B, 4, 5), (5, 6), (B, 4, 6)), "bij, bij -> b": ((B, 4, 5), (B, 4, 5), (B,))}
    left, right, result = shapes.get(equation, ((B, 4, 4), (4, 4), (B, 4)))
    x, y = made.input(*left), made.input(*right)
    found = rule(made, made.op("einsum", *result, equation=equation, tensors=(x, y)))
    if expected is None:
        assert found.letters == ""
    else:
        assert (letters(found), found.summed) == (equation.replace(" ", ""), expected)


def attention(heads: int, few: int, **arguments: object) -> Rule:
    made = Made()
    query, key, value = (made.input(B, count, 8, 4) for count in (heads, few, few))
    call = {"query": query, "key": key, "value": value, "attn_mask": None, **arguments}
    return rule(made, made.op("scaled_dot_product_attention", B, heads, 8, 4, **call))  # type: ignore[arg-type]


def test_heads_are_cut_in_groups_that_share_their_keys() -> None:
    found = attention(8, 2, dropout_p=0.0)
    assert letters(found) == "bhl.,bh..,bh.v->bhlv"
    assert found.units["h"] == Size.of(2)


def test_columns_of_values_stay_whole_where_weights_are_dropped_out() -> None:
    assert letters(attention(8, 8, dropout_p=0.1)) == "bhl.,bh..,bh..->bhl."


def test_a_mask_is_cut_where_it_is_not_broadcast() -> None:
    made = Made()
    mask = made.input(B, 1, 8, 8, dtype="bool")
    query = made.input(B, 4, 8, 4)
    call = made.op("scaled_dot_product_attention", B, 4, 8, 4, query=query, key=query, value=query, attn_mask=mask)
    assert rule(made, call).operands[-1] == "b.l."


def test_groups_of_channels_stay_together() -> None:
    made = Made()
    x, weight, bias = made.input(B, 12, 9), made.parameter(24, 3, 3), made.parameter(24)
    found = rule(made, made.op("conv1d", B, 24, 7, input=x, weight=weight, bias=bias, groups=4))
    assert (letters(found), found.units["o"]) == ("no.,o..,o->no.", Size.of(4))
    assert "o" in found.filled


def test_rows_of_a_table_that_are_elsewhere_are_zeros() -> None:
    made = Made()
    table, ids = made.parameter(10, 4), made.input(B, 5, dtype="int64")
    found = rule(made, made.op("embedding", B, 5, 4, weight=table, indices=ids))
    assert (letters(found), found.summed) == ("VE,ab->abE", "V")


@pytest.mark.parametrize(("option", "expected"), [("sparse", "Eab"), ("scale_grad_by_freq", "E")])
def test_what_counts_ids_sees_them_all(option: str, expected: str) -> None:
    made = Made()
    table, ids = made.parameter(10, 4), made.input(B, 5, dtype="int64")
    found = rule(made, made.op("embedding", B, 5, 4, weight=table, indices=ids, **{option: True}))
    assert set(found.letters) == set(expected)


def test_a_mean_loss_over_cut_samples_is_a_sum_and_over_cut_classes_is_whole() -> None:
    made = Made()
    logits, labels = made.input(B, 7), made.input(B, dtype="int64")
    found = rule(made, made.op("cross_entropy_loss", self=logits, target=labels, weight=None, reduction=1))
    assert found.strategy("N").outputs == (PARTIAL,)
    assert found.strategy("C").outputs == (REPLICATE,)
    assert found.strategy("C").operands == (sharded(1), COPY)


@pytest.mark.parametrize(
    ("kind", "arguments", "result", "expected", "summed"),
    [
        ("sum", {"dim": (1,), "keepdim": True}, (B, 1, 6), "abc->a.c", "b"),
        ("mean", {"dim": (-1,)}, (B, 5), "abc->ab", "c"),
        ("sum", {}, (), "abc->", "abc"),
        ("amax", {"dim": (1, 2)}, (B,), "a..->a", ""),
        ("argmax", {"dim": None, "keepdim": True}, (1, 1, 1), "...->...", ""),
        ("logsumexp", {"dim": (2,)}, (B, 5), "ab.->ab", ""),
        ("cumsum", {"dim": 1}, (B, 5, 6), "a.c->a.c", ""),
        ("softmax", {"dim": -2}, (B, 5, 6), "aZc->aZc", ""),
        ("_softmax", {"dim": -2}, (B, 5, 6), "a.c->a.c", ""),
    ],
)  # fmt: skip
def test_reductions(kind: str, arguments: dict, result: tuple, expected: str, summed: str) -> None:
    found = one(kind, (B, 5, 6), result, **arguments)
    assert (letters(found), found.summed) == (expected, summed)


def test_a_number_is_reduced_to_itself() -> None:
    assert letters(one("sum", (), (), dim=(-1,))) == "->"


@pytest.mark.parametrize(
    ("kind", "arguments", "source", "result", "expected"),
    [
        ("transpose", {"dim0": 1, "dim1": -1}, (B, 5, 6), (B, 6, 5), "abc->acb"),
        ("swapaxes", {"axis0": 1, "axis1": -1}, (B, 5, 6), (B, 6, 5), "abc->acb"),
        ("numpy_T", {}, (B, 5, 6), (6, 5, B), "abc->cba"),
        ("mT", {}, (B, 5, 6), (B, 6, 5), "abc->acb"),
        ("permute", {"dims": (2, 0, -2)}, (B, 5, 6), (6, B, 5), "abc->cab"),
        ("unsqueeze", {"dim": -1}, (B, 5), (B, 5, 1), "ab->ab."),
        ("squeeze", {"dim": 1}, (B, 5), (B, 5), "ab->ab"),
        ("squeeze", {}, (B, 1, 5, 1), (B, 5), "a.c.->ac"),
        ("slice", {"dim": 1, "start": 0, "end": 2**63 - 1}, (B, 5), (B, 5), "ab->ab"),
        ("slice", {"dim": 1, "start": -2}, (B, 5), (B, 2), "a.->a."),
        ("narrow", {"dim": 1, "start": 0, "length": 5}, (B, 5), (B, 5), "a.->a."),
        ("select", {"dim": -1, "index": 0}, (B, 5, 6), (B, 5), "ab.->ab"),
        ("unbind", {"dim": 1}, (B, 3, 6), (B, 6), "a.c->ac"),
        ("pad", {"pad": (1, 0), "mode": "constant"}, (B, 5, 6), (B, 5, 7), "ab.->ab."),
        ("expand", {"size": (-1, 4, -1)}, (B, 1, 6), (B, 4, 6), "a.c->abc"),
        ("flip", {"dims": (1,)}, (B, 5, 6), (B, 5, 6), "a.c->a.c"),
        ("tril", {}, (B, 5, 6), (B, 5, 6), "a..->a.."),
        ("repeat_interleave", {"repeats": 2, "dim": 1}, (B, 5), (B, 10), "ab->ab"),
        ("view.dtype", {"dtype": "int32"}, (B, 5), (B, 5), "..->.."),
        ("unfold", {"dimension": 1, "size": 2, "step": 1}, (B, 5), (B, 4, 2), "..->..."),
    ],
)  # fmt: skip
def test_shapes(kind: str, arguments: dict, source: tuple, result: tuple, expected: str) -> None:
    assert letters(one(f"aten.{kind}" if "." in kind else kind, source, result, **arguments)) == expected


def test_what_takes_the_shape_of_another_tensor_takes_that_of_its_slice() -> None:
    made = Made()
    x, like = made.input(B, 1, 6), made.input(B, 4, 6)
    assert letters(rule(made, made.op("expand_as", B, 4, 6, self=x, other=like))) == "a.c,abc->abc"


def test_a_dtype_is_taken_of_a_tensor_of_any_shape() -> None:
    made = Made()
    x, like = made.input(B, 6), made.input(B, 4, 2, 7)
    assert letters(rule(made, made.op("type_as", B, 6, self=x, other=like))) == "ab,....->ab"


def test_elements_of_all_dims_in_a_row_are_taken_from_the_whole() -> None:
    made = Made()
    x, places = made.input(B, 6), made.input(B, 4, dtype="int64")
    found = rule(made, made.op("take_along_dim", B * 4, self=x, indices=places, dim=None))
    assert found.letters == ""


def two(kind: str, *, dtype: str = "float32", twice: bool = False, writes: bool = False) -> Rule:
    made = Made()
    x = made.input(B, 6, dtype=dtype)
    y = x if twice else made.input(B, 1)
    return rule(made, made.op(kind, B, 6, self=x, other=y, writes=(x.name,) if writes else ()))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (two("add"), [{0, 1}]),
        (two("mul"), [{0}, {1}]),
        (two("div"), [{0}]),
        (two("mul", twice=True), []),
        (two("mul_", writes=True), [{0}]),
        (two("add", dtype="bool"), []),
        (two("maximum"), []),
    ],
)
def test_parts_that_add_up_go_through_what_is_linear(found: Rule, expected: list[set[int]]) -> None:
    assert [set(places) for places in found.linear] == expected


def test_what_is_broadcast_is_the_same_on_each_device() -> None:
    assert letters(two("add")) == "ab,a.->ab"


def test_an_op_that_is_not_in_the_table_reads_whole_tensors() -> None:
    found = one("roll", (B, 5), (B, 5), shifts=(1,), dims=(1,))
    assert (letters(found), found.letters, list(found.in_parts)) == ("..->..", "", [])


def drawn_rules() -> list[Callable[[], Rule]]:
    return [
        lambda: one("max_pool2d", (B, 4, 8, 8), (B, 4, 4, 4)),
        lambda: one("pad", (B, 4, 8), (B, 4, 9), pad=(1, 0), mode="reflect"),
    ]


@pytest.mark.parametrize("make", drawn_rules())
def test_kernels_that_refuse_what_is_empty_are_known(make: Callable[[], Rule]) -> None:
    """Samples may be fewer than devices, channels may not."""
    assert make().filled == "b"
