"""Mixtures of experts: those of Transformers become one op each, and what would count over all samples is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heterodyne as hd
from frontend.by_hand import Pipeline, take_gradients
from frontend.tiny_models import hugging_face, text_batch
from heterodyne.errors import CaptureError
from heterodyne.experts import mixture
from heterodyne.frontend import Captured, capture, loss_of, trace
from heterodyne.graph import ModelGraph, Op, Ref
from heterodyne.graph.sharding import COPY, PARTIAL, Sharding, sharded
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Exchange, Layout, Region, Stage
from heterodyne.plan.plan import Pipeline as Planned
from heterodyne.plan.sharded_stage import shard_stage
from heterodyne.runtime.exact.exchange import SampleExchange

WIDTH, INNER, EXPERTS, K = 8, 6, 4, 2

_OF_ALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": K,
}
_OF_EACH: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 12, "head_dim": 4, "norm_topk_prob": True},
}


def transformer(name: str, implementation: str = "grouped_mm", **more: Any) -> nn.Module:
    torch.manual_seed(0)
    model = hugging_face("AutoModelForCausalLM", name, **{**_OF_ALL, **_OF_EACH.get(name, {}), **more})
    model.config._experts_implementation = implementation
    return model


@cache
def captured(name: str, implementation: str, layers: int) -> tuple[nn.Module, Captured]:
    model = transformer(name, implementation, num_hidden_layers=layers)
    return model, trace(model, text_batch())


def mixtral() -> ModelGraph:
    return captured("mixtral", "grouped_mm", 2)[1].graph


def mixtures(graph: ModelGraph) -> list[Op]:
    return [op for op in graph.ops if op.kind == "experts"]


# ---- those of Transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "implementation", "layers"),
    [  # two of them where other tests want both
        ("mixtral", "grouped_mm", 2),
        ("mixtral", "batched_mm", 1),
        ("qwen2_moe", "grouped_mm", 2),
        ("qwen2_moe", "batched_mm", 1),
        ("qwen3_moe", "grouped_mm", 1),
        ("qwen3_moe", "batched_mm", 1),
    ],
)
def test_a_mixture_of_transformers_is_one_op_with_the_same_loss_and_gradients(
    name: str, implementation: str, layers: int
) -> None:
    model, found = captured(name, implementation, layers)
    batch = text_batch()
    assert [op.module for op in mixtures(found.graph)] == [f"model.layers.{n}.mlp.experts" for n in range(layers)]
    loss = loss_of(model(**batch))
    loss.backward()
    expected = take_gradients(model)
    pipeline = Pipeline.of(found, [0, len(found.graph.ops) // 2], model)
    forward = pipeline.forward(batch, 3)
    forward.backward()
    torch.testing.assert_close(forward.loss, loss, rtol=1e-6, atol=0.0)
    for parameter, gradient in take_gradients(model).items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-5, atol=1e-6)


def test_what_the_graph_says_of_a_mixture() -> None:
    (op, _) = mixtures(mixtral())
    rows, h, i = 16 * K, 16, 24  # of a sample
    assert dict(op.arguments)["activation"] == "silu"
    assert op.flops_forward(5) == 5 * rows * (2 * h * 2 * i + 2 * i * h)
    assert op.flops_backward(5) == 2 * op.flops_forward(5)
    assert op.samples == (0,), "its rows are those of the tokens"
    assert [size(3) for size in op.outputs[0].shape] == [3 * 16, h]
    assert op.operands[3:] == (
        Ref("model.layers.0.mlp.experts.gate_up_proj"),
        Ref("model.layers.0.mlp.experts.down_proj"),
    )


def test_in_half_precision_too() -> None:
    # The grouped product of PyTorch wants rows of multiples of 16 bytes.
    model = transformer("qwen3_moe", moe_intermediate_size=16, num_hidden_layers=1)
    assert [op.outputs[0].dtype for op in mixtures(capture(model.to(torch.bfloat16), text_batch()))] == ["bfloat16"]


def test_blocks_with_mixtures_are_alike_and_run_by_themselves() -> None:
    _, found = captured("qwen2_moe", "grouped_mm", 2)
    before, experts, behind = (block for block in found.graph.blocks if "layers.0" in block.name)
    assert [b.kind for b in (before, experts, behind)] == [b.kind for b in found.graph.blocks if "layers.1" in b.name]
    assert [op.kind for op in found.graph.ops_of(experts)] == ["experts"]
    for block in (before, experts, behind):
        module, inputs = found.block(block).instantiate(2, torch.device("cpu"))
        for output in module(*inputs):
            assert output.isfinite().all()


def test_a_head_that_balances_experts_runs_by_itself() -> None:
    """It divides by a count of tokens, which is a number and no tensor."""
    model = transformer("mixtral", num_hidden_layers=1, output_router_logits=True)
    found = trace(model, text_batch())
    module, inputs = found.block(found.graph.blocks[-1]).instantiate(2, torch.device("cpu"))
    assert all(output.isfinite().all() for output in module(*inputs))


def test_biases_stay_as_they_are() -> None:
    model = transformer("gpt_oss", "batched_mm", num_local_experts=EXPERTS, head_dim=4, num_hidden_layers=1)
    assert not mixtures(capture(model, text_batch()))


# ---- the op ------------------------------------------------------------------------------------------------------------


def of_one_mixture(samples: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((samples, WIDTH), (samples, K), (EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER))
    tokens, weights, gate_up, down = (
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    )
    # One expert is chosen by nobody.
    indices = torch.rand(samples, EXPERTS - 1, generator=generator).topk(K).indices
    return tokens, indices, weights, gate_up, down


def test_experts_as_they_are_stay_in_front_of_a_loss_that_balances_them() -> None:
    """A device counts the rows of its own samples; what all of them need is the use of each expert."""
    model = transformer(
        "gpt_oss", num_local_experts=EXPERTS, head_dim=4, num_hidden_layers=1, output_router_logits=True
    )
    found = trace(model, text_batch())
    assert found.graph.loss.reduction == "coupled"
    assert not mixtures(found.graph)
    batch = text_batch()
    together = found.coupled(model, torch.device("cpu"), SampleExchange(None, 0))
    loss = together(batch, {}, len(batch["input_ids"]))["loss"]
    torch.testing.assert_close(loss, loss_of(model(**batch)))


@pytest.mark.parametrize(
    "activation", [pytest.param("silu", marks=pytest.mark.tour("experts.py")), "gelu", "gelu_tanh"]
)
def test_the_gradients_of_a_mixture_are_those_of_its_function(activation: str) -> None:
    tokens, indices, *weights = of_one_mixture(5)
    assert torch.autograd.gradcheck(lambda t, *w: mixture(t, indices, *w, activation), (tokens, *weights))


def test_what_a_mixture_keeps_is_counted_without_values() -> None:
    (op, _) = mixtures(mixtral())
    kept: dict[int, int] = {}
    alive = []
    rows = 3 * 16
    shapes = ((rows, 16), (rows, K), (EXPERTS, 48, 16), (EXPERTS, 16, 24))
    tokens, weights, gate_up, down = (torch.randn(shape).requires_grad_() for shape in shapes)
    indices = torch.rand(rows, EXPERTS).topk(K).indices

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.ops.heterodyne.experts(tokens, indices, weights, gate_up, down, "silu")
    for parameter in (gate_up, down):
        del kept[parameter.untyped_storage().data_ptr()]
    assert op.bytes_saved(3) == sum(kept.values())


# ---- what is another one -----------------------------------------------------------------------------------------------


class Batched(nn.Module):
    """A mixture as Transformers writes it, each choice with matrices of its own; ``changed``: what is otherwise."""

    def __init__(self, changed: str = "", activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        turned = changed == "transposed"
        self.changed, self.activation = changed, activation
        self.gate_up = nn.Parameter(torch.randn((EXPERTS, WIDTH, 2 * INNER) if turned else (EXPERTS, 2 * INNER, WIDTH)))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        k = indices.shape[1]
        rows, chosen = tokens.repeat_interleave(k, dim=0), indices.reshape(-1)
        if self.changed == "transposed":
            inner = torch.bmm(rows.unsqueeze(1), self.gate_up[chosen]).squeeze(1)
        else:
            inner = torch.bmm(self.gate_up[chosen], rows.unsqueeze(-1)).squeeze(-1)
        if self.changed == "biased":
            inner = inner + self.bias[chosen]
        gate, up = (inner[..., ::2], inner[..., 1::2]) if self.changed == "interleaved" else inner.chunk(2, dim=-1)
        if self.changed == "up first":
            gate, up = up, gate
        inner = self.activation(gate) * up
        made = torch.bmm(self.down[chosen], inner.unsqueeze(-1)).squeeze(-1)
        weighted = made * weights.reshape(-1).unsqueeze(-1)
        result = weighted.view(tokens.shape[0], k, WIDTH).sum(dim=1).to(tokens.dtype)
        return result + made[::k].tanh() if self.changed == "read by others" else result


class OnTokens(nn.Module):
    """Tokens [B, 6, WIDTH] through a mixture over all of them, to a loss; ``around``: a context of the experts."""

    def __init__(self, experts: nn.Module, around: Callable[[], Any] = nullcontext, k: int = K) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts, self.around, self.k = experts, around, k

    def forward(self, tokens: Tensor) -> Tensor:
        flat = tokens.reshape(-1, WIDTH)
        weights, indices = self.router(flat).softmax(-1).topk(self.k)
        with self.around():
            made = self.experts(flat, indices, weights)
        return made.pow(2).mean()


def ops_of(experts: nn.Module, around: Callable[[], Any] = nullcontext) -> list[Op]:
    return mixtures(capture(OnTokens(experts, around), {"tokens": torch.randn(3, 6, WIDTH)}))


@pytest.mark.parametrize(
    ("activation", "name"),
    [(F.silu, "silu"), (F.relu, "relu"), (F.gelu, "gelu"), (nn.GELU(approximate="tanh"), "gelu_tanh")],
)
def test_experts_of_known_activations_are_recognised(activation: Callable[[Tensor], Tensor], name: str) -> None:
    (op,) = ops_of(Batched(activation=activation))
    assert op.argument("activation") == name


@pytest.mark.parametrize("changed", ["transposed", "biased", "interleaved", "up first", "read by others"])
def test_what_is_otherwise_in_anything_stays_as_it_is(changed: str) -> None:
    assert not ops_of(Batched(changed))


def test_another_activation_stays_as_it_is() -> None:
    assert not ops_of(Batched(activation=torch.tanh))


def test_under_autocast_of_its_own_a_mixture_stays_as_it_is() -> None:
    assert not ops_of(Batched(), lambda: torch.autocast("cpu", torch.bfloat16))
    assert ops_of(Batched(), lambda: torch.autocast("cpu", torch.bfloat16, enabled=False))


# ---- how it lies on devices --------------------------------------------------------------------------------------------


def in_parts(graph: ModelGraph, kind: str, shares: tuple[int, ...], latency_bytes: int, samples: int = 4) -> Sharding:
    """Of a stage with all of a graph; TaskGraphs are split, by the same shares."""
    layout = Layout(kind=kind, shares=shares)  # type: ignore[arg-type]  # one that there is
    marked = tuple(Region(task_graph=of.name, layout=Layout(kind="split", shares=shares)) for of in graph.task_graphs)
    stage = Stage(
        ops=(0, len(graph.ops)),
        devices=tuple(f"d{n}" for n in range(len(shares))),
        regions=(Region(layout=layout), *marked),
        exchange=Exchange(latency_bytes=latency_bytes),
    )
    found = shard_stage(graph, Planned(micro_batches=MicroBatches((samples,)), stages=(stage,)), 0)
    assert found is not None
    return found


def test_where_all_have_the_tokens_each_makes_its_part_of_all() -> None:
    graph = mixtral()
    found = in_parts(graph, "split", (2, 1), latency_bytes=10**6)
    (op, _) = mixtures(graph)
    strategy = found.strategies[op.name]
    assert (strategy.operands, strategy.outputs) == ((COPY, COPY, COPY, sharded(0), sharded(0)), (PARTIAL,))
    assert found.stored("model.layers.0.mlp.experts.gate_up_proj") == (0, (3, 1))
    assert found.stored("model.layers.0.mlp.experts.down_proj") == (0, (3, 1))


@pytest.mark.parametrize(
    ("shares", "k", "way"),
    [((3, 1, 2), 1, "ne"), ((3, 1, 2), 2, "ne"), ((2, 1), 1, "ne"), ((2, 1), 3, "e"), ((1, 1, 1), 4, "e")],
)
def test_tokens_travel_where_that_is_less_than_to_have_all_of_them(shares: tuple[int, ...], k: int, way: str) -> None:
    """Of p devices each would send its tokens to all others, and get the sums: 2 (p - 1) / p of all tokens; or 2 k (p - 1) / p^2."""
    graph = capture(OnTokens(Batched(), lambda: hd.split(len(shares)), k), {"tokens": torch.randn(3, 6, WIDTH)})
    found = in_parts(graph, "replicate", shares, latency_bytes=0)
    (op,) = mixtures(graph)
    assert found.strategies[op.name].name == way


def test_tokens_that_travel_and_experts_have_units_of_their_own() -> None:
    graph = capture(OnTokens(Batched(), lambda: hd.split(3)), {"tokens": torch.randn(3, 6, WIDTH)})
    found = in_parts(graph, "replicate", (3, 0, 1), latency_bytes=0)
    (op,) = mixtures(graph)
    strategy = found.strategies[op.name]
    assert (strategy.operands, strategy.outputs) == (
        (sharded(0), sharded(0), sharded(0), sharded(0, 1), sharded(0, 1)),
        (sharded(0),),
    )
    tokens, experts = (
        found.families.of[ref, strategy.operands[at]] for at, ref in enumerate(op.operands) if at in (0, 3)
    )
    assert (tokens.units.coefficients, experts.units.coefficients) == ((0, 1), (EXPERTS,))
    assert found.sizes(op.operands[0], sharded(0), 5) == (24, 0, 6)
    assert found.sizes(op.operands[3], sharded(0, 1), 5) == found.sizes(op.operands[4], sharded(0, 1), 5) == (3, 0, 1)


def test_fewer_experts_than_devices_are_not_cut() -> None:
    graph = capture(OnTokens(Batched(), lambda: hd.split(5)), {"tokens": torch.randn(3, 6, WIDTH)})
    found = in_parts(graph, "replicate", (1, 1, 1, 1, 1), latency_bytes=0)
    (op,) = mixtures(graph)
    assert [(entry.op, entry.letter, entry.units) for entry in found.narrow] == [(op.name, "e", EXPERTS)]
    assert found.stored("experts.gate_up") is None


# ---- counting over all samples -----------------------------------------------------------------------------------------


class WithCapacity(nn.Module):
    """Rows that come too late for their expert count nothing; ``count`` tells the place of each, of [B, T] or [B T] choices."""

    def __init__(self, count: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.behind = nn.Linear(1, 1)
        self.count = count

    def forward(self, tokens: Tensor) -> Tensor:
        probabilities, chosen = self.router(tokens).softmax(-1).max(-1)
        kept = probabilities * (self.count(chosen) < 3).view_as(probabilities)
        return self.behind(kept.unsqueeze(-1)).mean()


def one_after_the_other(chosen: Tensor) -> Tensor:
    """In the queue of all samples, an expert after the other."""
    queue = F.one_hot(chosen.reshape(-1), EXPERTS)
    return ((queue.cumsum(0) - queue) * queue).sum(-1)


def by_sample(chosen: Tensor) -> Tensor:
    queue = F.one_hot(chosen, EXPERTS)
    return ((queue.cumsum(1) - queue) * queue).sum(-1)


def order_of_an_order(chosen: Tensor) -> Tensor:
    return chosen.reshape(-1).argsort(stable=True).argsort()


def order_of_a_sort(chosen: Tensor) -> Tensor:
    return chosen.reshape(-1).sort(stable=True)[1].sort()[1] - 1


def written_places(chosen: Tensor) -> Tensor:
    order = chosen.reshape(-1).argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0])
    return places


@pytest.mark.parametrize(
    ("count", "op"),
    [
        (one_after_the_other, "cumsum"),
        (order_of_an_order, "lt"),
        (order_of_a_sort, "lt"),
        (written_places, "lt"),
    ],
)
def test_a_capacity_of_the_whole_batch_is_refused(count: Callable[[Tensor], Tensor], op: str) -> None:
    with pytest.raises(
        CaptureError, match=rf"(?s)test_experts.py:\d+: .*aten\.{op}.*keep the samples in a dim of their own"
    ):
        capture(WithCapacity(count), {"tokens": torch.randn(3, 6, WIDTH)})


@pytest.mark.parametrize("count", [by_sample, lambda chosen: chosen.argsort(1).argsort(1)])
def test_a_capacity_of_each_sample_is_not(count: Callable[[Tensor], Tensor]) -> None:
    capture(WithCapacity(count), {"tokens": torch.randn(3, 6, WIDTH)})


class Sorted(nn.Module):
    """Tokens in order of expert, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.layer = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        flat = tokens.reshape(-1, WIDTH)
        order = self.router(flat).argmax(-1).argsort()
        return self.layer(flat[order])[order.argsort()].pow(2).mean()


def test_rows_may_be_sorted_and_sorted_back() -> None:
    capture(Sorted(), {"tokens": torch.randn(3, 6, WIDTH)})


@pytest.mark.parametrize("mixed", [lambda y: y.roll(1, 0), lambda y: y.flip(0)])
def test_labels_of_other_samples_are_compared_in_the_loss_alone(mixed: Callable[[Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, EXPERTS)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.layer(tokens), mixed(labels))

    graph = capture(Model(), {"tokens": torch.randn(3, WIDTH), "labels": torch.zeros(3, dtype=torch.long)})
    assert graph.loss.reduction == "coupled"
