"""What a graph says of the small things: sources, regions without gradients, random ops, inputs, ties, frozen weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frontend.captured_models import captured_case
from frontend.tiny_models import GPT, TOKENS, VOCABULARY, text_batch
from heterodyne.errors import CaptureError
from heterodyne.frontend import capture, trace
from heterodyne.graph import ModelGraph, Op

ANOTHER_PROCESS = """
import json, resource
import torch
from frontend.captured_models import captured_case
from frontend.tiny_models import GPT, text_batch
from heterodyne.frontend import capture
with torch.device("meta"):
    large = GPT(layers=4, width=16384, heads=64)
graph = capture(large, text_batch(2))
kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with torch.device("meta"):
    model = GPT()
print(json.dumps(dict(parameters=graph.parameter_count, kinds=len(graph.kinds), kibibytes=kibibytes,
                      fingerprint=capture(model, text_batch(5)).fingerprint)))
"""


@pytest.fixture(scope="module")
def another_process() -> dict[str, Any]:
    """A large model and a small one, captured where nothing else was, with other hashes of strings."""
    environment = {**os.environ, "PYTHONHASHSEED": "12", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", ANOTHER_PROCESS]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


class Loss(nn.Module):
    """Any module, squared and averaged."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).pow(2).mean()


def op_of(graph: ModelGraph, name: str) -> Op:
    (found,) = [op for op in graph.ops if op.target.split(".")[1] == name]
    return found


def test_an_op_knows_its_line_its_module_and_its_inputs() -> None:
    graph = captured_case("gpt").graph
    embedding = graph.ops[0]
    assert embedding.target == "aten.embedding.default"
    assert embedding.inputs == ("input_ids",)
    assert embedding.parameters == ("tokens.weight",)
    assert embedding.module == "tokens"
    file, _, line = embedding.source.partition(":")
    assert file == "tiny_models.py"
    text = Path(sys.modules[GPT.__module__].__file__ or "").read_text().splitlines()
    assert "self.tokens(input_ids)" in text[int(line) - 1]
    names = {"input_ids", "labels"} | {op.name for op in graph.ops}
    assert all(set(op.inputs) <= names for op in graph.ops)
    assert len({op.name for op in graph.ops}) == len(graph.ops)


def test_sizes_are_polynomials_in_the_batch() -> None:
    graph = captured_case("gpt").graph
    first = graph.ops[0].outputs[0]
    assert [size(5) for size in first.shape] == [5, TOKENS, 32]
    assert first.bytes(5) == 5 * TOKENS * 32 * 4


@pytest.mark.tour("frontend/")
def test_inputs_say_which_of_them_follow_the_batch() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
            return ((self.linear(x) + shift) * scale).mean()

    batch = (torch.zeros(4, 4), torch.zeros(1, 4), torch.zeros(()))
    graph = capture(Shifted(), batch)
    assert [(i.name, i.batch_dim) for i in graph.inputs] == [("x", 0), ("shift", None), ("scale", None)]
    assert trace(Shifted(), batch).loss_count.statistics_of((torch.zeros(9, 4), *batch[1:]))[0] == 9


def test_a_batch_of_one_and_one_like_a_width_stay_dynamic() -> None:
    graphs = [capture(Loss(nn.Linear(4, 4)), (torch.zeros(size, 4),)) for size in (1, 4, 6)]
    assert len({graph.fingerprint for graph in graphs}) == 1
    assert graphs[0].ops[0].outputs[0].shape[0](10) == 10


def test_a_position_table_or_mask_that_is_a_plain_attribute() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.mask = torch.tril(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) @ self.mask).mean()

    captured = trace(Masked(), (torch.zeros(2, 4),))
    program = captured.block(captured.graph.blocks[0])
    module, _ = program.instantiate(3, torch.device("cpu"))
    assert any(torch.equal(buffer, torch.tril(torch.ones(4, 4))) for buffer in module.buffers())


class Frozen(nn.Module):
    def __init__(self, *, by_flag: bool) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 8)
        self.head = nn.Linear(8, 4)
        self.by_flag = by_flag
        if by_flag:
            self.backbone.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.by_flag:
            features = self.backbone(x)
        else:
            with torch.no_grad():
                features = self.backbone(x)
        return self.head(features).pow(2).mean()


@pytest.mark.parametrize("by_flag", [True, False])
def test_what_needs_no_gradient_costs_none(by_flag: bool) -> None:
    graph = capture(Frozen(by_flag=by_flag), (torch.zeros(2, 4),))
    backbone, head = [op for op in graph.ops if op.target == "aten.linear.default"]
    assert backbone.flops_forward(3) == 2 * 3 * 4 * 8
    assert backbone.flops_backward(3) == 0
    assert backbone.bytes_saved(3) == 0
    assert head.flops_backward(3) == head.flops_forward(3), "only the weight needs a gradient"
    assert head.bytes_saved(3) == 3 * 8 * 4, "its input"


def test_a_region_without_gradients_runs_without_them_in_its_block() -> None:
    captured = trace(Frozen(by_flag=False), (torch.zeros(2, 4),))
    for block in captured.graph.blocks:
        program = captured.block(block)
        module, inputs = program.instantiate(3, torch.device("cpu"))
        outputs = module(*inputs)
        assert torch.is_grad_enabled()
        assert [o.differentiable for o in program.outputs] == [o.requires_grad for o in outputs]


def test_autocast_inside_the_model_stays_inside_its_block() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.linear(x)
            return y.float().pow(2).mean()

    captured = trace(Mixed(), (torch.zeros(2, 4),))
    assert op_of(captured.graph, "linear").outputs[0].dtype == "bfloat16"
    program = captured.block(captured.graph.blocks[0])
    module, inputs = program.instantiate(3, torch.device("cpu"))
    (loss,) = module(*inputs)
    loss.backward()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("module", "drawn"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.Dropout(0.1).eval(), False),
        (nn.AlphaDropout(0.2), True),
        (nn.ReLU(), False),
    ],
)
def test_random_ops_are_those_that_draw(module: nn.Module, drawn: bool) -> None:
    graph = capture(Loss(nn.Sequential(nn.Linear(4, 4), module)), (torch.zeros(2, 4),))
    assert bool(graph.random) == drawn
    assert set(graph.random) <= {op.name for op in graph.ops}


def test_draws_that_cannot_belong_to_the_samples_are_refused_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"test_trace.py:\d+: aten.rrelu.*cannot be made to belong to the samples"):
        capture(Loss(nn.Sequential(nn.Linear(4, 4), nn.RReLU())), (torch.zeros(2, 4),))


def test_attention_with_dropout_is_random() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            q = self.linear(x).unsqueeze(1)
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).mean()

    assert len(capture(Attention(), (torch.zeros(2, 3, 4),)).random) == 1


@pytest.mark.parametrize(
    ("norm", "mixes"),
    [
        (nn.BatchNorm2d(4), True),
        (nn.BatchNorm2d(4).eval(), False),
        (nn.BatchNorm2d(4, track_running_stats=False), True),
        (nn.GroupNorm(2, 4), False),
        (nn.InstanceNorm2d(4), False),
    ],
)
def test_batch_statistics_are_those_of_batch_norm_in_training(norm: nn.Module, mixes: bool) -> None:
    model = Loss(nn.Sequential(nn.Conv2d(3, 4, 3), norm))
    graph = capture(model, (torch.zeros(2, 3, 8, 8),))
    assert bool(graph.batch_statistics) == mixes


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_a_gradient_of_an_embedding_that_no_plan_has_is_refused_with_the_line(
    layer: type[nn.Module], option: str
) -> None:
    options: dict[str, Any] = {option: True}
    model = Loss(nn.Sequential(layer(5, 4, **options), nn.Linear(4, 4)))
    with pytest.raises(CaptureError, match=rf"test_trace.py:\d+: .*\n.*'.*0\.weight' is .*{option}=False"):
        capture(model, (torch.zeros(2, 3, dtype=torch.long),))


NORMS_REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "form that cannot be taken over all devices": lambda h: torch.native_batch_norm(
        h, None, None, None, None, True, 0.1, 1e-5
    )[0],
    "channels .* that belong to samples": lambda h: F.batch_norm(h.flatten(0, 1)[None], None, None, training=True),
}


@pytest.mark.parametrize("told", NORMS_REFUSED)
def test_batch_norm_that_cannot_be_taken_over_all_devices_is_refused(told: str) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv1d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return NORMS_REFUSED[told](self.layer(x)).pow(3).mean()

    with pytest.raises(CaptureError, match=rf"test_trace.py:\d+: .*\n.*{told}"):
        capture(Normed(), (torch.zeros(2, 3, 8),))


def test_an_annotation_encloses_its_ops() -> None:
    class Annotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.fx.traceback.annotate({"heterodyne": "wide"}):
                x = self.second(x)
            return x.mean()

    graph = capture(Annotated(), (torch.zeros(2, 4),))
    assert [op.annotation for op in graph.ops] == [None, "wide", None]


def test_a_set_of_words_is_gone_through_in_one_order_in_every_process() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterDict(
                {word: torch.ones(4) for word in ["sliding", "full", "chunked", "local", "global", "linear"]}
            )

        def forward(self, x: Tensor) -> Tensor:
            found = {word: x * self.weights[word] for word in set(self.weights)}
            assert isinstance(set(found), set)
            assert isinstance({1}, set)
            return sum(found.values(), torch.zeros(())).mean()

    graph = capture(ByName(), (torch.zeros(2, 4),))
    read = [name for op in graph.ops for name in op.parameters]
    assert read == sorted(read)
    assert len(read) == 6
    assert "set" not in globals()


def test_views_cost_no_traffic_and_copies_do() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).transpose(1, 2).contiguous().view(-1, 6).mean()

    graph = capture(Moves(), (torch.zeros(2, 6, 4),))
    assert op_of(graph, "transpose").bytes_written(3) == 0
    assert op_of(graph, "view").bytes_read(3) == 0
    assert op_of(graph, "contiguous").bytes_written(3) == 3 * 6 * 4 * 4
    linear = op_of(graph, "linear")
    assert linear.bytes_read(3) == 4 * (3 * 6 * 4 + 4 * 4 + 4)
    assert linear.bytes_written(3) == 4 * 3 * 6 * 4


def test_the_fingerprint_is_the_same_in_another_process(another_process: dict[str, Any]) -> None:
    assert another_process["fingerprint"] == captured_case("gpt").graph.fingerprint


@pytest.mark.parametrize("change", [{"layers": 1}, {"width": 64}, {"heads": 2}, {"dropout": 0.1}])
def test_the_fingerprint_changes_with_the_model(change: dict[str, Any]) -> None:
    assert capture(GPT(**change), text_batch()).fingerprint != captured_case("gpt").graph.fingerprint


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Linear(4, 4), ["model"]),
        (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), ["inner.0", "inner.2"]),
        (nn.ModuleDict({"a": nn.Linear(4, 4)}), None),
    ],
)
def test_blocks_of_models_without_layers(model: nn.Module, names: list[str] | None) -> None:
    if isinstance(model, nn.ModuleDict):
        model = nn.Sequential(model["a"], nn.Tanh())
    graph = capture(Loss(model), (torch.zeros(2, 4),))
    assert graph.blocks[0].start == 0
    assert graph.blocks[-1].stop == len(graph.ops)
    if names is not None and len(names) > 1:
        assert [block.name for block in graph.blocks][: len(names)] == names


def test_layers_with_unlike_constants_are_of_unlike_kinds() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.LayerNorm(4, eps=eps) for eps in (1e-5, 1e-5, 1e-6))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.mean()

    first, second, third = (b.kind for b in capture(Norms(), (torch.zeros(2, 4),)).blocks if "layers" in b.name)
    # The first differs too: no gradient flows back to what the user passed in.
    assert len({first, second, third}) == 3


def test_the_weights_of_a_large_model_are_never_there(another_process: dict[str, Any]) -> None:
    """13 billion parameters, in a process of its own; `benchmarks/capture_large.py` does it for 70."""
    assert another_process["parameters"] > 12e9
    assert another_process["kinds"] == 3
    assert another_process["kibibytes"] < 2 * 2**20


def test_what_only_the_strict_trace_understands_is_captured_too() -> None:
    class Numpy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.from_numpy(np.abs(x.numpy()))
            for layer in self.layers:
                x = layer(x)
            return x.mean()

    graph = capture(Numpy(), (torch.zeros(2, 4),))
    assert [b.name for b in graph.blocks] == ["stem", "layers.0", "layers.1", "layers.2", "head"]
    assert [p.name for p in graph.parameters][:2] == ["layers.0.weight", "layers.0.bias"]


def test_random_inputs_are_valid_indices() -> None:
    captured = captured_case("gpt")
    first, last = captured.graph.blocks[0], captured.graph.blocks[-1]
    _, (ids,) = captured.block(first).instantiate(8, torch.device("cpu"))
    assert isinstance(ids, Tensor)
    assert 0 <= ids.min() < ids.max() < VOCABULARY
    assert ids.max() > TOKENS, "bounded by the table of tokens, not that of positions"
    _, inputs = captured.block(last).instantiate(8, torch.device("cpu"))
    (labels,) = [x for x in inputs if isinstance(x, Tensor) and not x.is_floating_point()]
    assert 0 <= labels.min() < labels.max() < VOCABULARY


def test_a_block_in_another_precision() -> None:
    captured = captured_case("gpt")
    for block in captured.graph.kinds.values():
        module, inputs = captured.block(block).instantiate(2, torch.device("cpu"), dtype=torch.bfloat16)
        assert {o.dtype for o in module(*inputs)} == {torch.bfloat16}


def test_an_unused_input_is_no_obstacle() -> None:
    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return self.linear(x).mean()

    graph = capture(Ignores(), {"x": torch.zeros(2, 4), "unused": torch.zeros(2, 3)})
    assert [i.name for i in graph.inputs] == ["x", "unused"]


def test_a_loss_without_the_inputs_is_refused() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.sum()

    with pytest.raises(CaptureError, match="does not depend on"):
        capture(Constant(), (torch.zeros(2, 4),))
