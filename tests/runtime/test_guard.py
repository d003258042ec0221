"""The check before the first step must itself find what is wrong: each case is a sound capture with one piece of it broken."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.api.stage_cutting import StageCutter
from heterodyne.errors import CaptureError, DataError, HeterodyneError, VerifyError
from heterodyne.frontend import Captured, trace
from heterodyne.graph.ir import Loss, ModelGraph
from heterodyne.loss_count import CountedBy, LossCount
from heterodyne.runtime.exact.finding import Finding, words_of
from heterodyne.runtime.exact.guard import compare_forms
from heterodyne.runtime.exact.small_batch import small_batch, without_counts
from heterodyne.runtime.slices import as_source
from multiprocess.models import build, capture_of

CPU = torch.device("cpu")
Batch = dict[str, Tensor]


class Plain(nn.Module):
    """What is captured. The others have its parameters, and are what the user would have written."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.second(self.middle(torch.tanh(self.first(x)))))).squeeze(-1), y)

    def middle(self, h: Tensor) -> Tensor:
        return h

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return (h - y).pow(2).mean()


class BySize(Plain):
    def middle(self, h: Tensor) -> Tensor:
        return h / h.shape[0] ** 0.5


class ByPlace(Plain):
    def middle(self, h: Tensor) -> Tensor:
        return h + torch.arange(h.shape[0])[:, None]


class AcrossSamples(Plain):
    def middle(self, h: Tensor) -> Tensor:
        return h - h.mean(0, keepdim=True)


class Counting(Plain):
    def middle(self, h: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return h * self.calls


class Streaming(Plain):
    """Goes on where it was, if the batch is of the same size: parts of other sizes do not show it."""

    state: tuple[Tensor, ...] = ()

    def middle(self, h: Tensor) -> Tensor:
        last = self.state[0] if self.state and self.state[0].shape == h.shape else torch.zeros_like(h)
        self.state = (h.detach(),)
        return h + 0.1 * last


class Renormed(Plain):
    def middle(self, h: Tensor) -> Tensor:
        self.second.weight.data = F.normalize(self.second.weight.data)
        return h


class DrawsOutside(Plain):
    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if random.random() < 1e-9 else h


class WritesItsBatch(Plain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.mul_(2), y)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class OwnBackward(Plain):
    def middle(self, h: Tensor) -> Tensor:
        return _Reversed.apply(h)  # type: ignore[no-any-return, no-untyped-call]


class Hooked(Plain):
    def middle(self, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return h


class OtherOp(Plain):
    def middle(self, h: Tensor) -> Tensor:
        return h.relu()


class NotAlone(Plain):
    """Fails on one sample."""

    def middle(self, h: Tensor) -> Tensor:
        assert h.shape[0] > 1, "a pair at least"
        return h


class Masked(nn.Module):
    """Dropout, and labels that count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.dropout(self.body(x), 0.5, self.training)), labels, ignore_index=2)


def masked_batch() -> Batch:
    return {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), "labels": torch.tensor([0, 1, 1, 0])}


@functools.cache
def masked() -> Captured:
    return trace(Masked(), masked_batch())


def batch_of(samples: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(samples, 4, generator=generator), "y": torch.randn(samples, generator=generator)}


@functools.cache
def plain() -> tuple[Plain, Captured]:
    torch.manual_seed(0)
    model = Plain()
    return model, trace(model, batch_of())


def nothing(batch: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> float:
    """Of a sum nobody asks what it counts."""
    raise AssertionError


def compared(
    kind: type[Plain],
    *,
    graph: ModelGraph | None = None,
    count: LossCount | None = None,
    batch: Batch | None = None,
    budget_s: float = math.inf,
) -> tuple[Finding, ...]:
    """Of a module of that kind, by the capture of the plain one."""
    model, found = plain()
    module = kind()
    module.load_state_dict(model.state_dict())
    graph = graph or found.graph
    return compare_forms(
        module,
        as_source(batch or batch_of(), graph),
        graph=graph,
        loss_count=count or found.loss_count,
        stage_programs=StageCutter(found, module) if graph is found.graph else None,
        device=CPU,
        budget_s=budget_s,
    )


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("gpt", ["parts", "cut"]),  # ties, an unused parameter
        ("mixed", ["parts", "cut"]),  # BatchNorm and dropout
        ("sum", ["parts", "cut"]),
        ("terms", ["cut"]),  # denominators of their own, for which the module's own loss is no use in parts
        ("similar", ["parts"]),  # samples that see each other, for which there are no parts and no cuts
    ],
)
def test_what_is_exact_agrees_in_all_forms_that_plans_can_give_it(name: str, forms: list[str]) -> None:
    found = capture_of(name)
    case = build(found.graph, 4)
    assert_agrees(found, case.module, case.batch, forms)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x).squeeze(-1) - y).pow(2).mean()


def test_batchnorm_is_fed_parts_with_the_same_statistics() -> None:
    found = trace(Normed(), batch_of())
    assert_agrees(found, Normed(), batch_of())
    graph = replace(found.graph, loss=Loss(reduction="sum"))
    (finding,) = compare_forms(
        Normed(),
        as_source(batch_of(), graph),
        graph=graph,
        loss_count=CountedBy(nothing, graph.loss),
        stage_programs=None,
        device=CPU,
    )
    assert finding.parts == (4, 8)
    assert finding.losses[0] == pytest.approx(2 * finding.losses[1], rel=1e-5)


class Twins(nn.Module):
    """Both halves of a pair go through one BatchNorm, so a cut between the two calls would part its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = (self.head(self.norm(self.body(half))) for half in (x, x * 2 + 1))
        return (F.cosine_similarity(one, other) - y).pow(2).mean()


def test_a_cut_that_is_refused_leaves_the_model_as_it_was_for_the_next() -> None:
    batch, module = batch_of(), Twins()
    found = trace(module, batch)
    assert_agrees(found, module, batch)
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())


def test_dropout_and_ignored_labels_agree_in_parts_and_cut() -> None:
    assert_agrees(masked(), Masked(), masked_batch())


class SharedMask(nn.Module):
    """Attention over as many places as the batch has samples, by a mask that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        query = self.query(x)
        seen = F.scaled_dot_product_attention(query, x, x, attn_mask=mask)
        return F.mse_loss(self.head(seen.mean(1)).squeeze(-1), y)


def test_an_input_that_all_samples_share_is_told_by_name_and_goes_to_every_part_whole() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(5, 5, 4), "mask": torch.randn(5, 5), "y": torch.randn(5)}
    with pytest.raises(CaptureError, match=r"test_guard.py:(?s:.*)pass shared=\('mask',\): then the model can be"):
        trace(SharedMask(), batch)
    found = trace(SharedMask(), batch, shared=("mask",))
    assert {entry.name: entry.batch_dim for entry in found.graph.inputs} == {"x": 0, "mask": None, "y": 0}
    assert_agrees(found, SharedMask(), batch)


def forms_of(found: Captured, module: nn.Module, batch: Batch) -> tuple[Finding, ...]:
    return compare_forms(
        module,
        as_source(batch, found.graph),
        graph=found.graph,
        loss_count=found.loss_count,
        stage_programs=StageCutter(found, module),
        device=CPU,
    )


def assert_agrees(found: Captured, module: nn.Module, batch: Batch, forms: Sequence[str] = ("parts", "cut")) -> None:
    findings = forms_of(found, module, batch)
    assert [finding.form for finding in findings] == list(forms)
    for finding in findings:
        assert finding.agrees, words_of(finding, found.graph)
        assert finding.errors.keys() == {name for name, p in module.named_parameters() if p.requires_grad} - {"unused"}


@pytest.mark.parametrize("kind", [BySize, ByPlace, AcrossSamples])
def test_samples_that_see_the_batch_are_found_by_the_parts(kind: type[Plain]) -> None:
    (finding,) = compared(kind)
    assert finding.form == "parts"
    assert not finding.agrees
    told = words_of(finding, plain()[1].graph)
    assert "5 samples in parts of 1, 1 and 3" in told
    assert "the loss (test_guard.py:" in told
    assert "first.weight (test_guard.py:" in told
    assert "reads no other sample" in told


def test_a_denominator_that_was_not_seen_is_found_by_the_parts() -> None:
    graph = replace(plain()[1].graph, loss=Loss(reduction="sum"))
    (finding,) = compared(Plain, graph=graph, count=CountedBy(nothing, graph.loss))
    assert "loss" in finding.beyond
    assert finding.losses[0] > 2 * finding.losses[1]


def test_a_part_that_counts_nothing_and_is_no_zero_is_found() -> None:
    """Also where no sample of the data counts nothing: then labels are made up that do."""
    graph = replace(plain()[1].graph, loss=Loss(reduction="mean", count="tokens"))

    def positive(batch: Mapping[str, Tensor], _: Mapping[str, Tensor]) -> float:
        return float((batch["y"] > 0).sum())

    batch = batch_of()
    batch["y"] = batch["y"].abs() + 0.1
    (finding,) = compared(Plain, graph=graph, count=CountedBy(positive, graph.loss), batch=batch)
    assert finding.empty_first
    assert not finding.agrees
    assert "counts nothing" in words_of(finding, graph)
    # Without it there is nothing to be found: all samples count one, which is what this loss divides by.
    batch["y"] = torch.tensor([-1.0, *batch["y"][1:].tolist()])
    (finding,) = compared(Plain, graph=graph, count=CountedBy(positive, graph.loss), batch=batch)
    assert finding.empty_first
    assert not finding.agrees


@pytest.mark.parametrize("kind", [OwnBackward, Hooked])
def test_a_backward_that_the_graph_lost_is_found_by_the_cut_with_its_line(kind: type[Plain]) -> None:
    in_parts, cut = compared(kind)
    if kind is OwnBackward:  # clamping a gradient is another thing in parts
        assert in_parts.agrees
    assert cut.beyond == ("first.weight", "first.bias")
    told = words_of(cut, plain()[1].graph)
    assert "the loss agrees" in told
    assert "those from second.weight (test_guard.py:" in told
    assert "look between them: test_guard.py:" in told
    assert "autograd.Function" in told


def test_another_op_is_found_by_the_cut() -> None:
    in_parts, cut = compared(OtherOp)
    assert in_parts.agrees
    assert "loss" in cut.beyond


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Counting, "in a second call on the same samples"),
        (Streaming, r"keeps something from one call to the next. It sets 'state\[0\]' in forward"),
        (Renormed, r"puts other values into 'second.weight' in its forward"),
        (WritesItsBatch, "writes into 'x' of its batch in forward"),
        (DrawsOutside, "draws random numbers from Python's random"),
    ],
)
def test_what_a_call_keeps_for_the_next_is_refused(kind: type[Plain], said: str) -> None:
    with pytest.raises(HeterodyneError, match=said):
        compared(kind)


def test_a_part_that_the_model_does_not_take_is_told() -> None:
    (finding,) = compared(NotAlone)
    assert "AssertionError: a pair at least" in words_of(finding, plain()[1].graph)


def test_weights_that_begin_as_zero_hide_nothing() -> None:
    model, found = plain()
    module = OwnBackward()
    module.load_state_dict(model.state_dict())
    nn.init.zeros_(module.head.weight)
    assert not forms_of(found, module, batch_of())[-1].agrees


class Ramped(Plain):
    """With a part that grows from zero, by a buffer and by an entry of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ramp", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        self.weight = weight[:, None]
        return super().forward(x, y)

    def middle(self, h: Tensor) -> Tensor:
        return h + self.grown(h)

    def grown(self, h: Tensor) -> Tensor:
        return h * self.ramp + h * self.weight


class RampedBuffer(Ramped):
    def grown(self, h: Tensor) -> Tensor:
        return h / h.shape[0] * self.ramp + h * self.weight


class RampedEntry(Ramped):
    def grown(self, h: Tensor) -> Tensor:
        return h * self.ramp + h / h.shape[0] * self.weight


@pytest.mark.parametrize("kind", [Ramped, RampedBuffer, RampedEntry])
def test_buffers_and_entries_that_begin_as_zero_hide_nothing(kind: type[Ramped]) -> None:
    batch = {**batch_of(), "weight": torch.zeros(len(batch_of()["x"]))}
    model, module = Ramped(), kind()
    module.load_state_dict(model.state_dict())
    found = trace(model, batch)
    findings = forms_of(found, module, batch)
    assert all(finding.agrees for finding in findings) == (kind is Ramped)
    if kind is not Ramped:
        assert findings[0].woken == ("ramp", "weight")
        assert "in place of the zeros of ramp, weight" in words_of(findings[0], found.graph)


def test_rounding_is_no_disagreement() -> None:
    """Half precision adds parts up with errors of percents, which are those of the model itself."""
    torch.manual_seed(0)
    model = Plain().to(torch.bfloat16)
    batch = {name: tensor.to(torch.bfloat16) for name, tensor in batch_of().items()}
    found = trace(model, batch)
    findings = forms_of(found, model, batch)
    assert max(finding.largest for finding in findings) > 1e-5
    assert all(finding.agrees for finding in findings)


def test_without_numbers_or_time_there_is_nothing_to_compare_and_a_failure_is_told() -> None:
    batch = batch_of()
    batch["x"][:] = float("nan")
    assert compared(Plain, batch=batch) == ()

    class Failing(Plain):
        def middle(self, h: Tensor) -> Tensor:
            raise RuntimeError("not today")

    with pytest.raises(TimeoutError, match="it takes about"):
        compared(Plain, budget_s=0.0)
    with pytest.raises(VerifyError, match=r"Plain fails on 5 samples.*RuntimeError: not today"):
        compared(Failing)


def test_small_batches_are_real_samples_and_begin_with_one_that_counts_nothing() -> None:
    graph, count = masked().graph, masked().loss_count
    x, labels = torch.randn(4, 4), torch.tensor([0, 2, 1, 2])
    made = small_batch(as_source({"x": x, "labels": labels}, graph), graph, count, {}, 5)
    assert (made.parts, made.empty_first, made.made_up) == ((1, 1, 3), True, False)
    assert made.tensors["labels"].tolist() == [2, 1, 0, 1, 0]
    assert torch.equal(made.tensors["x"], x[[1, 2, 0, 2, 0]])
    made = small_batch(as_source({"x": x, "labels": labels.clamp(max=1)}, graph), graph, count, {}, 3)
    assert (made.parts, made.empty_first, made.made_up) == ((1, 2), True, True)
    assert made.tensors["labels"].tolist() == [2, 1, 1], "the label that this loss ignores"
    with pytest.raises(DataError, match="no sample of the example counts"):
        small_batch(as_source({"x": x, "labels": torch.full((4,), 2)}, graph), graph, count, {}, 5)


def test_samples_are_left_out_of_the_count_by_the_input_that_decides_it() -> None:
    batch = {"x": torch.randn(4, 4), "labels": torch.tensor([0, 1, 1, 0])}
    changed = without_counts(batch, masked().graph, masked().loss_count, {}, range(1, 3))
    assert changed is not None
    assert changed["labels"].tolist() == [0, 2, 2, 0]
    assert batch["labels"].tolist() == [0, 1, 1, 0]
    model, found = plain()
    del model
    assert without_counts(batch_of(), found.graph, found.loss_count, {}, range(1)) is None
