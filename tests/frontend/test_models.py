"""Whole models of many kinds: what the graph says of them is what PyTorch does with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from frontend.conftest import captured_case
from frontend.tiny_models import build
from heterodyne.frontend import BlockProgram, Captured, capture, loss_of
from heterodyne.graph import ModelGraph

CONTRACTIONS = ("linear", "matmul", "mm", "bmm", "addmm", "conv", "scaled_dot", "einsum")
# Traced, Transformers gives these an explicit mask, and with it repeats keys and values; eager it leaves both to the kernel.
MASKED_IN_THE_TRACE = {"llama": 1.12, "mixtral": 1.12, "vit": 1.05, "t5": 1.05, "bert": 1.05, "gpt2": 1.05}


# torch counts attention on accelerators; these are its own formulas for the operators that a CPU has for it.
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
        sdpa_backward_flop_count(g, q, k, v)
    ),
}


def contraction_flops(graph: ModelGraph, batch: int) -> tuple[float, float]:
    ops = [op for op in graph.ops if op.target.split(".")[1].startswith(CONTRACTIONS)]
    return sum(op.flops_forward(batch) for op in ops), sum(op.flops_backward(batch) for op in ops)


def test_flops_are_those_that_torch_counts(case: str, captured: Captured) -> None:
    model, batch = build(case)
    if case == "mixtral":
        pytest.skip("torch counts the experts of Transformers' own operator as nothing")
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        loss = loss_of(model(**batch))
        forward = counter.get_total_flops()
        loss.backward()
        backward = counter.get_total_flops() - forward
    counted_forward, counted_backward = contraction_flops(captured.graph, 3)
    assert counted_forward == forward
    assert counted_backward == backward


def test_saved_bytes_are_those_that_autograd_packs(case: str, captured: Captured) -> None:
    model, batch = build(case)
    weights = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model(**batch))
    predicted = captured.graph.bytes_saved()(3)
    actual = sum(saved.values())
    assert predicted >= 0.995 * actual, "memory is never promised away"
    assert predicted <= MASKED_IN_THE_TRACE.get(case, 1.005) * actual


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    def state() -> list[Any]:
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return [(name, id(t), t._version, t.grad) for name, t in tensors] + [
            (name, id(m), type(m), m.training, sorted(vars(m))) for name, m in model.named_modules()
        ]

    before, random = state(), torch.random.get_rng_state()
    yield
    assert state() == before
    assert torch.equal(torch.random.get_rng_state(), random)


@pytest.mark.parametrize("case", ["gpt", "bert", "resnet"])
def test_the_model_is_left_as_it_was(case: str) -> None:
    model, batch = build(case)
    with unchanged(model):
        capture(model, batch)


def test_the_graph_is_the_same_from_meta_and_for_another_batch(case: str, captured: Captured) -> None:
    with torch.device("meta"):
        model, batch = build(case)
    smaller = {
        name: torch.empty((2, *value.shape[1:]), dtype=value.dtype, device="meta") for name, value in batch.items()
    }
    assert capture(model, smaller).fingerprint == captured.graph.fingerprint


def test_parameters_are_those_of_the_model(case: str, captured: Captured) -> None:
    model, _ = build(case)
    graph = captured.graph
    assert {p.name: p.shape for p in graph.parameters} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    everything = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    assert {name for p in graph.parameters for name in (p.name, *p.aliases)} == everything
    read = {name for op in graph.ops for name in op.parameters}
    assert {p.name for p in graph.parameters} <= read, "each of these models uses all its parameters"


def test_blocks_cover_the_graph_and_know_their_like(case: str, captured: Captured) -> None:
    graph = captured.graph
    assert graph.blocks[0].start == 0
    assert graph.blocks[-1].stop == len(graph.ops)
    assert all(a.stop == b.start and a.start < a.stop for a, b in zip(graph.blocks, graph.blocks[1:], strict=False))
    assert len({block.name for block in graph.blocks}) == len(graph.blocks)
    layers = {
        "gpt": ["layers.0", "layers.1"],
        "llama": [f"model.layers.{i}" for i in range(2)],
        "mixtral": [f"model.layers.{i}" for i in range(2)],
        "gpt2": [f"transformer.h.{i}" for i in range(2)],
        "bert": [f"bert.encoder.layer.{i}" for i in range(2)],
        "vit": [f"vit.layers.{i}" for i in range(2)],
    }
    if case in layers:
        assert [block.name for block in graph.blocks[1:-1]] == layers[case]
        assert len({block.kind for block in graph.blocks[1:-1]}) == 1
        assert len(graph.kinds) == 3


def test_blocks_of_an_encoder_and_a_decoder() -> None:
    names = [block.name for block in captured_case("t5").graph.blocks]
    assert [n for n in names if n.startswith("encoder")] == [f"encoder.block.{i}" for i in range(2)]
    assert [n for n in names if n.startswith("decoder")] == [f"decoder.block.{i}" for i in range(2)]
    kinds = {block.name: block.kind for block in captured_case("t5").graph.blocks}
    assert kinds["decoder.block.1"] != kinds["encoder.block.1"]


def test_blocks_of_a_resnet_are_its_layers_not_its_stages() -> None:
    graph = captured_case("resnet").graph
    expected = [f"resnet.encoder.stages.{s}.layers.{i}" for s, depth in enumerate((2, 3, 2)) for i in range(depth)]
    assert [block.name for block in graph.blocks[1:-1]] == expected
    kinds = {block.name: block.kind for block in graph.blocks}
    assert kinds["resnet.encoder.stages.1.layers.1"] == kinds["resnet.encoder.stages.1.layers.2"]


def run_with(program: BlockProgram, model: nn.Module, batch: int, values: dict[str, Any]) -> nn.Module:
    """Run a block on given values and on the model's weights; add its outputs to the values."""
    module, _ = program.instantiate(batch, torch.device("cpu"))
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, attribute in program.attributes.items():
            if name in weights:
                getattr(module, attribute).copy_(weights[name])
    inputs = [int(i.size(batch)) if i.size is not None else values[i.name] for i in program.inputs]
    values.update(zip([output.name for output in program.outputs], module(*inputs), strict=True))
    return module


def gradients(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = loss_of(model(**batch))
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_blocks_run_one_by_one_are_the_model(case: str, captured: Captured) -> None:
    model, batch = build(case)
    values: dict[str, Any] = dict(batch)
    summed: dict[str, Tensor] = {}
    modules = []
    for block in captured.graph.blocks:
        program = captured.block(block)
        modules.append((program, run_with(program, model, 3, values)))
    loss = values[captured.block(captured.graph.blocks[-1]).outputs[-1].name]
    loss.backward()
    for program, module in modules:
        for name, attribute in program.attributes.items():
            grad = getattr(module, attribute).grad
            if grad is not None:
                summed[name] = summed.get(name, 0) + grad
    expected_loss, expected = gradients(model, batch)
    torch.testing.assert_close(loss, expected_loss)
    assert summed.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(summed[name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batch", [1, 4])
def test_every_block_runs_by_itself(captured: Captured, batch: int) -> None:
    for block in captured.graph.kinds.values():
        program = captured.block(block)
        module, inputs = program.instantiate(batch, torch.device("cpu"))
        outputs = module(*inputs)
        assert [tuple(int(s(batch)) for s in o.spec.shape) for o in program.outputs] == [
            tuple(o.shape) for o in outputs
        ]
        assert [o.differentiable for o in program.outputs] == [o.requires_grad for o in outputs]
        differentiable = [o for o in outputs if o.requires_grad]
        torch.autograd.backward(differentiable, [torch.ones_like(o) for o in differentiable])
        for flowing, value in zip(program.inputs, inputs, strict=True):
            if isinstance(value, Tensor):
                assert value.requires_grad == flowing.differentiable
                assert (value.grad is not None) == flowing.differentiable
        assert all(torch.isfinite(o).all() for o in differentiable)


def test_a_block_moves_to_another_device_whole(captured: Captured) -> None:
    for block in captured.graph.kinds.values():
        module, inputs = captured.block(block).instantiate(2, torch.device("meta"))
        assert {o.device.type for o in module(*inputs)} == {"meta"}


def test_the_count_of_labels_that_are_not_ignored(case: str, captured: Captured) -> None:
    _, batch = build(case)
    shifted = batch["labels"][..., 1:] if case in ("llama", "gpt2", "mixtral") else batch["labels"]
    assert captured.graph.loss.count == "tokens"
    count = captured.loss_count
    assert count.total(count.statistics_of(batch)) == (shifted != -100).sum().item()


def test_unequal_parts_add_up_to_the_whole(case: str, captured: Captured) -> None:
    if captured.graph.batch_statistics:
        pytest.skip("BatchNorm mixes the samples")
    model, batch = build(case)
    whole = captured.loss_count.statistics_of(batch)
    _, expected = gradients(model, batch)
    model.zero_grad()
    for part in (slice(0, 1), slice(1, 3)):
        piece = {name: value[part] for name, value in batch.items()}
        (
            loss_of(model(**piece)) * captured.loss_count.weight(captured.loss_count.statistics_of(piece), whole)
        ).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)
