"""What crosses the cuts: straight from maker to reader, without inputs and without what is cheap to make again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterodyne.graph import Input, ModelGraph, Size, TensorSpec
from heterodyne.graph.cut import computed_again, crossings
from pure.build import graph

MASK = TensorSpec(shape=(Size.per_sample(1), Size.of(4)), dtype="bool")


def with_mask(model: ModelGraph, *, flops: float = 4, readers: tuple[str, ...] = ("layer1.up", "head")) -> ModelGraph:
    """A mask, made from an input behind the embedding, which some ops read."""
    first, *rest = model.ops
    mask = replace(
        first,
        name="mask",
        inputs=("attention_mask",),
        parameters=(),
        outputs=(MASK,),
        differentiable=(False,),
        flops_forward=Size.per_sample(flops),
    )
    ops = [replace(op, inputs=(*op.inputs, "mask")) if op.name in readers else op for op in rest]
    blocks = [replace(b, start=b.start + (b.index > 0), stop=b.stop + 1) for b in model.blocks]
    inputs = (Input(name="attention_mask", spec=MASK, batch_dim=0),)
    return replace(model, ops=(first, mask, *ops), blocks=tuple(blocks), inputs=inputs)


def test_a_chain_crosses_each_cut_once() -> None:
    model = graph(4)
    found = crossings(model, (0, 3, 7))
    assert [(c.name, c.producer, c.consumers) for c in found] == [("layer0.down", 0, (1,)), ("layer2.down", 1, (2,))]
    assert all(c.differentiable for c in found)
    assert found[0].bytes(3) == 3 * 8 * 4


def test_nothing_crosses_without_a_cut() -> None:
    assert crossings(graph(4), (0,)) == ()


@pytest.mark.tour("graph/")
def test_a_skip_goes_straight_over_the_stages_between() -> None:
    model = graph(4)
    head = replace(model.ops[-1], inputs=(*model.ops[-1].inputs, "embed"))
    skipping = replace(model, ops=(*model.ops[:-1], head))
    found = {c.name: (c.producer, c.consumers) for c in crossings(skipping, (0, 3, 5))}
    assert found["embed"] == (0, (2,))
    assert crossings(skipping, (0, 1))[0].consumers == (1,)  # once, though two ops read it there


def test_masks_are_made_again_and_do_not_cross() -> None:
    model = with_mask(graph(4))
    assert computed_again(model) == {"mask"}
    assert [c.name for c in crossings(model, (0, 4, 8))] == ["layer0.down", "layer2.down"]


def test_what_is_dear_or_random_or_learned_crosses() -> None:
    dear = with_mask(graph(4), flops=1e6)
    assert computed_again(dear) == set()
    assert ("mask", 0, (1, 2)) in [(c.name, c.producer, c.consumers) for c in crossings(dear, (0, 3, 8))]
    assert not next(c for c in crossings(dear, (0, 4, 8)) if c.name == "mask").differentiable
    assert computed_again(replace(with_mask(graph(4)), random=("mask",))) == set()
    learned = with_mask(graph(4))
    reading = [replace(op, parameters=("embed.weight",)) if op.name == "mask" else op for op in learned.ops]
    assert computed_again(replace(learned, ops=tuple(reading))) == set()
