"""What authors mark in forward arrives in the ModelGraph, changes nothing else, and is refused with the line where it means nothing."""

from __future__ import annotations

import linecache
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import heterodyne as hd
from frontend.by_hand import Pipeline
from heterodyne.errors import CaptureError
from heterodyne.frontend import capture, trace
from heterodyne.graph import ModelGraph, task_graph_runs

BATCH = (torch.zeros(3, 4),)

Forward = Callable[[nn.ModuleList, Tensor], Tensor]


class Model(nn.Module):
    """Linear layers, called as the test has it."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self.layers, x).pow(2).mean()


@pytest.fixture(autouse=True)
def _no_default() -> Iterator[None]:
    yield
    hd.set_default_strategy(None)


def graph_of(forward: Forward) -> ModelGraph:
    return capture(Model(forward), BATCH)


def annotations(graph: ModelGraph) -> list[tuple[str, str | None]]:
    return [(op.target.split(".")[1], op.annotation) for op in graph.ops]


def line_with(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return found


@pytest.mark.tour("annotate.py")
def test_a_scope_is_a_task_graph() -> None:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        x = layers[0](x)
        with hd.split(4):  # the scope
            x = layers[1](x).relu()
        with hd.replicate(2, "tail"):
            return layers[2](x)

    graph = graph_of(forward)
    marked = [("linear", "split(4)"), ("relu", "split(4)"), ("linear", "tail")]
    assert annotations(graph) == [("linear", None), *marked, ("pow", None), ("mean", None)]
    first, second = graph.task_graphs
    assert (first.name, first.kind, first.device_count, first.default) == ("split(4)", "split", 4, False)
    assert (second.name, second.kind, second.device_count, second.default) == ("tail", "replicate", 2, False)
    assert first.source == f"{Path(__file__).name}:{line_with('the scope')}"


def test_a_scope_in_a_loop_is_several() -> None:
    again = hd.split(4, "experts")

    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            with again:
                x = layer(x)
            with hd.replicate(4):
                x = x.relu()
        return x

    graph = graph_of(forward)
    names = [f"{name}#{k}" for k in range(3) for name in ("experts", "replicate(4)")]
    assert [task_graph.name for task_graph in graph.task_graphs] == names
    assert [op.annotation for op in graph.ops] == [*names, None, None]


def test_split_in_replicate_takes_its_ops_out_of_it() -> None:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        with hd.replicate(4, "outer"):
            x = layers[0](x)
            with hd.split(4, "inner"):
                x = layers[1](x)
            return layers[2](x)

    graph = graph_of(forward)
    assert [op.annotation for op in graph.ops] == ["outer", "inner", "outer", None, None]
    assert [(t.name, t.inside) for t in graph.task_graphs] == [("outer", None), ("inner", "outer")]
    assert [(r.task_graph.name, r.start, r.stop) for r in task_graph_runs(graph)] == [
        ("outer", 0, 1),
        ("inner", 1, 2),
        ("outer", 2, 3),
    ]


def test_a_scope_that_encloses_nothing_is_none() -> None:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        with hd.split(4), torch.no_grad():
            pass
        with hd.replicate(4), hd.split(4):
            return layers[0](x)

    (only,) = graph_of(forward).task_graphs
    assert (only.name, only.inside) == ("split(4)", None)


def test_scopes_hold_through_regions_calls_and_early_returns() -> None:
    def helper(layers: nn.ModuleList, x: Tensor) -> Tensor:
        with hd.split(4, "here"):
            with torch.no_grad():
                y = layers[0](x) * torch.tensor(2.0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return (layers[1](x) + y).float()

    graph = graph_of(lambda layers, x: helper(layers, x) + torch.arange(4))
    assert {name for _, name in annotations(graph)[:-4]} == {"here"}
    assert annotations(graph)[-4:] == [("arange", None), ("add", None), ("pow", None), ("mean", None)]


def test_a_default_covers_what_is_in_no_scope() -> None:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        x = layers[0](x)
        hd.set_default_strategy(hd.replicate(4))  # the default
        x = layers[1](x)
        with hd.split(4):
            x = layers[2](x)
        return x.relu()

    graph = graph_of(forward)
    default = "replicate(4)"
    assert [name for _, name in annotations(graph)] == [None, default, "split(4)", default, default, default]
    first, second = graph.task_graphs
    assert (first.default, first.section, first.source) == (True, 0, f"test_annotate.py:{line_with('the default')}")
    assert (second.default, second.section, second.inside) == (False, 0, default)


def test_each_default_is_a_task_graph_of_its_own() -> None:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            hd.set_default_strategy(hd.replicate(2))
            x = layer(x)
        hd.set_default_strategy(None)
        x = x.relu()
        hd.set_default_strategy(hd.split(2))
        with hd.replicate(2, "last"):
            return x.sigmoid()

    graph = graph_of(forward)
    names = [f"replicate(2)#{k}" for k in range(3)]
    assert [name for _, name in annotations(graph)] == [*names, None, "last", "split(2)", "split(2)"]
    assert [t.section for t in graph.task_graphs] == [0, 1, 2, 3, 3]


def test_a_default_from_outside_holds_until_it_is_changed() -> None:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        return layers[0](x)

    hd.set_default_strategy(hd.replicate(2))
    for _ in range(2):
        assert {name for _, name in annotations(graph_of(forward))} == {"replicate(2)"}
    hd.set_default_strategy(hd.split(3))
    assert {name for _, name in annotations(graph_of(forward))} == {"split(3)"}
    hd.set_default_strategy(None)
    assert graph_of(forward).task_graphs == ()


def test_a_default_from_forward_holds_in_that_forward_alone() -> None:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        x = layers[0](x)
        hd.set_default_strategy(hd.replicate(2, "late"))
        return layers[1](x)

    model = Model(forward)
    model(*BATCH)  # a forward that merely runs sets nothing
    first = capture(model, BATCH)
    assert annotations(first)[:2] == [("linear", None), ("linear", "late")]
    assert capture(model, BATCH).task_graphs == first.task_graphs
    assert graph_of(lambda layers, x: layers[0](x)).task_graphs == ()
    hd.set_default_strategy(hd.replicate(4))
    assert annotations(capture(model, BATCH))[:2] == [("linear", "replicate(4)"), ("linear", "late")]


def test_marks_of_others_stay() -> None:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        hd.set_default_strategy(hd.replicate(2))
        with torch.fx.traceback.annotate({"mine": 1}):
            with hd.split(2):
                x = layers[0](x)
            return layers[1](x)

    assert annotations(graph_of(forward))[:2] == [("linear", "split(2)"), ("linear", "replicate(2)")]
    assert "custom" not in torch.fx.traceback.current_meta


def with_scopes(layers: nn.ModuleList, x: Tensor) -> Tensor:
    hd.set_default_strategy(hd.replicate(2))
    x = layers[0](x)
    with hd.split(2):
        x = layers[1](x).relu()
    return layers[2](x)


def without(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[2](layers[1](layers[0](x)).relu())


def test_the_same_loss_is_captured() -> None:
    marked, plain = Model(with_scopes), Model(without)
    plain.load_state_dict(marked.state_dict())
    batch = {"x": torch.rand(3, 4)}
    captured = trace(marked, batch)
    graph, other = captured.graph, capture(plain, batch)
    assert [op.target for op in graph.ops] == [op.target for op in other.ops]
    assert [block.kind for block in graph.blocks] == [block.kind for block in other.blocks]
    expected = plain(**batch)
    assert torch.equal(marked(**batch), expected)
    assert torch.equal(Pipeline.of(captured, [0, 2], marked).forward(batch, 3).loss, expected)


def test_the_fingerprint_tells_marks_but_not_their_lines() -> None:
    def elsewhere(layers: nn.ModuleList, x: Tensor) -> Tensor:
        hd.set_default_strategy(hd.replicate(2))
        x = layers[0](x)
        with hd.split(2):
            x = layers[1](x).relu()
        return layers[2](x)

    first, second = graph_of(with_scopes), graph_of(elsewhere)
    assert first.task_graphs != second.task_graphs
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != graph_of(without).fingerprint


def nested(outer: Any, inner: Any) -> Forward:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        with outer:  # around
            x = layers[0](x)
            with inner:  # within
                return layers[1](x)

    return forward


@pytest.fixture(params=["eager", "captured"])
def use(request: pytest.FixtureRequest) -> Callable[[Forward], object]:
    """A forward, as it runs and as it is captured: what is wrong is told in both."""
    return graph_of if request.param == "captured" else lambda forward: Model(forward)(*BATCH)


@pytest.mark.parametrize(
    ("outer", "inner", "told"),
    [
        (hd.split(4), hd.split(2, "mine"), "both are 'split'.*leave one of the scopes out"),
        (hd.replicate(4), hd.replicate(4, "mine"), "both are 'replicate'"),
        (hd.split(4), hd.replicate(4, "mine"), "is 'split'.*Put replicate around split"),
    ],
)
def test_nesting_that_means_nothing_is_refused(
    use: Callable[[Forward], object], outer: Any, inner: Any, told: str
) -> None:
    with pytest.raises(CaptureError, match=told) as caught:
        use(nested(outer, inner))
    message, line = str(caught.value), line_with("within")
    assert message.startswith(f"{__file__}:{line}: {linecache.getline(__file__, line).strip()}\n")
    assert "'mine'" in message
    assert f"{outer.name!r} (test_annotate.py:{line_with('around')})" in message
    # Nothing is left behind: what is right goes through afterwards.
    use(nested(hd.replicate(4), hd.split(4)))


def test_a_scope_does_not_nest_in_itself(use: Callable[[Forward], object]) -> None:
    scope = hd.replicate(2)
    with pytest.raises(CaptureError, match="both are 'replicate'"):
        use(nested(scope, scope))


def test_three_deep_is_refused_too(use: Callable[[Forward], object]) -> None:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        with hd.replicate(4), hd.split(4), hd.replicate(4):
            return layers[0](x)

    with pytest.raises(CaptureError, match="Put replicate around split"):
        use(forward)


def test_a_default_in_a_scope_is_refused(use: Callable[[Forward], object]) -> None:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        with hd.split(4):
            hd.set_default_strategy(hd.replicate(4))  # too late
            return layers[0](x)

    with pytest.raises(CaptureError, match=rf":{line_with('too late')}: (?s:.*)Set it before that scope begins"):
        use(forward)


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "4", None])
@pytest.mark.parametrize("primitive", [hd.replicate, hd.split])
def test_a_count_is_a_whole_number_from_one_on(
    use: Callable[[Forward], object], primitive: Callable[..., Any], count: object
) -> None:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        with primitive(count, "mine"):  # no count
            return layers[0](x)

    with pytest.raises(CaptureError, match=f"'mine'.*whole number from 1 on, not {re.escape(repr(count))}") as caught:
        use(forward)
    assert str(caught.value).startswith(f"{__file__}:{line_with('no count')}: ")


@pytest.mark.parametrize("name", ["", "*", "a#1", 3])
def test_a_name_is_one_that_a_plan_can_hold(name: Any) -> None:
    with pytest.raises(CaptureError, match="the name of a TaskGraph"):
        hd.split(4, name)


@pytest.mark.parametrize("strategy", ["replicate", 4, hd.replicate])
def test_a_default_is_one_of_the_primitives(strategy: Any) -> None:
    with pytest.raises(CaptureError, match=r"give heterodyne\.replicate\(count\)"):
        hd.set_default_strategy(strategy)


def test_outside_of_a_capture_scopes_do_nothing() -> None:
    before = dict(torch.fx.traceback.current_meta)
    with hd.split(4):
        assert torch.fx.traceback.current_meta == before
    with pytest.raises(ZeroDivisionError), hd.split(4):
        _ = 1 / 0
    with hd.split(2):  # the scope before was left
        pass


def test_the_line_is_the_authors_however_a_scope_is_entered() -> None:
    with ExitStack() as stack:
        stack.enter_context(hd.replicate(4))
        with pytest.raises(CaptureError) as caught:
            stack.enter_context(hd.replicate(2))  # by a stack
    assert str(caught.value).startswith(f"{__file__}:{line_with('by a stack')}: ")


def test_threads_have_scopes_of_their_own() -> None:
    failed: list[BaseException] = []

    def enter() -> None:
        try:
            with hd.split(4):
                pass
        except CaptureError as error:
            failed.append(error)

    with hd.split(4):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert failed == []


def test_a_compiled_forward_is_not_disturbed() -> None:
    model = Model(with_scopes)
    x = torch.rand(3, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))


def test_the_strict_trace_does_not_lose_marks_silently() -> None:
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        x = torch.from_numpy(np.abs(x.numpy()))
        with hd.split(4):
            return layers[0](x)

    with pytest.raises(CaptureError, match="leaves PyTorch for numpy"):
        graph_of(forward)
