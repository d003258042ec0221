"""Gradient buckets: a partition that every rank cuts alike, ordered as the backward completes it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from heterodyne.graph import ModelGraph, Parameter
from heterodyne.plan import gradient_buckets
from heterodyne.plan.buckets import room_bytes
from pure.build import graph


@given(st.integers(1, 6), st.integers(1, 3000))
def test_each_trainable_parameter_is_in_one_bucket(layers: int, size: int) -> None:
    model = graph(layers)
    buckets = gradient_buckets(model, size)
    names = [name for bucket in buckets for name in bucket.parameters]
    assert sorted(names) == sorted(p.name for p in model.parameters)
    assert sum(bucket.bytes for bucket in buckets) == model.trainable_bytes
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))


@given(st.integers(1, 6), st.integers(1, 3000))
def test_buckets_are_full_but_not_overfull(layers: int, size: int) -> None:
    model = graph(layers)
    buckets = gradient_buckets(model, size)
    largest = max(p.bytes for p in model.parameters)
    assert all(bucket.bytes >= size for bucket in buckets[:-1])
    assert all(bucket.bytes < size + largest for bucket in buckets)


@given(st.integers(1, 6), st.integers(1, 3000))
def test_they_become_ready_in_their_order(layers: int, size: int) -> None:
    ready = [bucket.ready_block() for bucket in gradient_buckets(graph(layers), size)]
    assert ready == sorted(ready, reverse=True)
    assert ready[-1] == 0


def with_parameters(model: ModelGraph, **changes: Parameter) -> ModelGraph:
    return replace(model, parameters=tuple(changes.get(p.name.split(".")[0], p) for p in model.parameters))


def test_frozen_parameters_are_not_reduced() -> None:
    model = graph(2)
    frozen = with_parameters(model, embed=replace(model.parameters[0], trainable=False))
    assert "embed.weight" not in {n for b in gradient_buckets(frozen, 1) for n in b.parameters}
    none = replace(model, parameters=tuple(replace(p, trainable=False) for p in model.parameters))
    assert gradient_buckets(none, 1) == ()


def test_one_dtype_a_bucket() -> None:
    model = graph(2)
    mixed = with_parameters(model, head=replace(model.parameters[-1], dtype="bfloat16"))
    first, rest = gradient_buckets(mixed, 10**9)
    assert first.parameters == ("head.weight",)
    assert first.bytes * 2 == model.parameters[-1].bytes
    assert "embed.weight" in rest.parameters


def test_a_tied_parameter_waits_for_its_first_reader() -> None:
    model = graph(2)
    tied = replace(model.ops[-1], parameters=("embed.weight",))
    model = replace(model, ops=(*model.ops[:-1], tied), parameters=model.parameters[:-1])
    bucket = next(b for b in gradient_buckets(model, 1) if "embed.weight" in b.parameters)
    assert bucket.ready_block() == 0


def test_a_parameter_that_nothing_reads_is_reduced_last() -> None:
    model = graph(2)
    extra = replace(model.parameters[0], name="unused.weight")
    assert gradient_buckets(replace(model, parameters=(extra, *model.parameters)), 1)[-1].parameters == (
        "unused.weight",
    )


def test_a_room_has_two_halves_that_no_bucket_however_long_makes_larger() -> None:
    assert room_bytes(1000, 3) == 2 * 1024
    assert room_bytes(1, 3) == 2 * 3 * 64
    assert room_bytes(2**30, 3) == room_bytes(2**40, 5) == 2 * 2**21
