"""Models without a graph, and compiled ones, through `distribute`, on the one device of this process."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heterodyne as hd
from heterodyne.errors import CaptureError, HeterodyneError, PlanError
from heterodyne.plan.plan import Plan


class Chooses(nn.Module):
    """Ragged sequences: each sample ends where its length says, and long ones take a layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.more, self.head = nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 7)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        rows = []
        for row, length in zip(tokens, lengths.tolist(), strict=True):
            h = self.embed(row[:length]).mean(0)
            rows.append(self.head(self.more(h) if length > 3 else h))
        return torch.stack(rows)


class WithLoss(nn.Module):
    """A model and a loss outside of it, as one module."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, tokens: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        return self.loss_fn(self.model(tokens, lengths), labels)


def batch_of(samples: int, longest: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(samples * longest)
    labels = torch.randint(0, 7, (samples,), generator=generator)
    labels[0] = -100
    tokens = torch.randint(0, 7, (samples, longest), generator=generator)
    return {"tokens": tokens, "lengths": torch.arange(samples) % longest + 1, "labels": labels}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)  # type: ignore[arg-type]


def counted(batch: Any) -> Tensor:
    return (batch["labels"] != -100).sum()


def test_a_loss_outside_tells_what_it_divides_by_though_the_model_has_no_graph(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = WithLoss(Chooses(), nn.CrossEntropyLoss())
    plain = copy.deepcopy(model)
    batches = [batch_of(6, longest) for longest in (5, 3, 7)]
    with hd.distribute(
        model, batches[0], optimizer=sgd, plan=hd.PlanOptions(micro_batch_sizes=(1, 2), measure_s=0.05)
    ) as trainer:
        results = [trainer.step(batch) for batch in batches]
        assert trainer.evaluate(batch_of(4, 6)) == pytest.approx(plain_loss(model, batch_of(4, 6)), rel=1e-5)
        assert [result.count for result in results] == [5, 5, 5], "one label of six does not count"
        kept = trainer.plan
        assert trainer.graph.opaque
    told = capfd.readouterr().err
    assert "test_as_it_is.py:31: rows.append(self.head(self.more(h) if length > 3 else h))" in told
    assert "was compared with itself in parts on the first batch, and" in told
    optimizer = sgd(plain.parameters())
    for batch, result in zip(batches, results, strict=True):
        optimizer.zero_grad()
        expected = plain(**batch)
        expected.backward()
        optimizer.step()
        assert result.loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())

    (pipeline,) = kept.pipelines
    stage = pipeline.stages[0].model_copy(update={"recompute": (0,)})
    cut = kept.model_copy(update={"pipelines": (pipeline.model_copy(update={"stages": (stage,)}),)})
    with pytest.raises(PlanError, match=r"stage 0 recomputes.*there is no graph of this model.*length > 3"):
        hd.distribute(model, batches[0], plan=Plan.parse(cut.dump()))


def plain_loss(model: nn.Module, batch: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return float(model(**batch))


def test_what_a_model_without_a_graph_cannot_have_is_refused_before_anything_is_measured() -> None:
    model, batch = WithLoss(Chooses(), F.cross_entropy), batch_of(4, 5)
    with pytest.raises(
        CaptureError, match=r"test_as_it_is.py:31(.|\n)*'pipeline' cuts the model(.|\n)*strategy 'data'"
    ):
        hd.distribute(model, batch, plan="pipeline", loss=hd.LossOptions(loss_count=counted))

    class Inside(WithLoss):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.inner = model

        def forward(self, tokens: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = self.inner(tokens, lengths, labels)
            return loss

    with pytest.raises(CaptureError, match=r"test_as_it_is.py:31(.|\n)*pass loss=LossOptions\(loss_count='samples'\)"):
        hd.distribute(Inside(), batch)
    graphless: Any = lambda output, labels: F.cross_entropy(output, labels) * int(labels.sum() > 0)  # noqa: E731
    with pytest.raises(CaptureError, match=r"pass loss=LossOptions\(loss_count='samples'\)"):
        hd.distribute(WithLoss(Chooses(), graphless), batch)


class Warms(Chooses):
    """Changes after some calls: the parts of a batch are as many calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        self.calls[0] += 1
        return super().forward(tokens, lengths) * (2 if self.calls[0] > 1000 else 1)


class Streams(Chooses):
    state: tuple[Tensor, ...] = ()

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        found = super().forward(tokens, lengths)
        last = self.state[0] if self.state and self.state[0].shape == found.shape else torch.zeros_like(found)
        self.state = (found.detach(),)
        return found + last


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Warms, r"test_as_it_is.py:\d+: self.calls\[0\] \+= 1\nforward changes"),
        (Streams, "in a second call on the same samples"),
    ],
)
def test_what_a_call_keeps_for_the_next_is_refused(kind: type[nn.Module], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        hd.distribute(WithLoss(kind(), nn.CrossEntropyLoss()), batch_of(6, 5), optimizer=sgd)


class Remembers(nn.Module):
    """Computes a weight in each forward, and keeps activations on itself; hooks keep others in a dict, a list and an object."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)
        self.hidden: Tensor | None = None
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.kept["hidden"] = torch.tanh(self.body(x))
        return self.head(self.hidden)


def points() -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


class Sink:
    def __init__(self) -> None:
        self.last: Tensor | None = None

    def take(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self.last = output


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_an_earlier_forward_has_left_is_copied_and_what_hooks_keep_is_as_it_was() -> None:
    seen: dict[str, Tensor] = {}
    calls: list[Tensor] = []
    sink, of_a_lambda, criterion = Sink(), Sink(), nn.CrossEntropyLoss()
    model, plain = Remembers(), Remembers()
    model.head.register_forward_hook(lambda module, inputs, output: seen.update(head=output))
    model.head.register_forward_hook(lambda module, inputs, output: calls.append(output))
    model.head.register_forward_hook(lambda module, inputs, output: of_a_lambda.take(module, inputs, output))
    model.body.register_forward_hook(sink.take)
    batch = points()
    model(batch[0])
    before = seen["head"], calls[0], sink.last, of_a_lambda.last
    with hd.distribute(
        model, batch, loss=criterion, optimizer=sgd, plan=hd.PlanOptions(measure_s=1, rehearsal_s=0)
    ) as trainer:
        assert all(
            one is of for one, of in zip((seen["head"], *calls, sink.last, of_a_lambda.last), before, strict=True)
        )
        found = [trainer.step(batch).loss for _ in range(2)]
    optimizer = sgd(plain.parameters())
    for loss in found:
        optimizer.zero_grad()
        expected = criterion(plain(batch[0]), batch[1])
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


def test_a_tensor_that_was_computed_before_forward_is_refused_with_the_line_that_reads_it() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)
            self.kept = [self.inner.weight * 2]

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.kept[0].T + self.inner(x)

    with pytest.raises(
        CaptureError, match=r"x @ self.kept\[0\].T .*\n.*computed from other tensors before this forward"
    ):
        hd.distribute(Doubled(), points(), loss=nn.CrossEntropyLoss(), optimizer=sgd)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean()


def test_a_compiled_model_is_captured_and_named_as_the_one_inside_and_runs_compiled() -> None:
    torch.manual_seed(0)
    plain, batch, ran = Plain(), {"x": torch.randn(4, 4)}, []
    expected = plain(**batch).item()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*inputs: Any) -> Any:
            ran.append(len(inputs))
            return graph(*inputs)

        return run

    model: Any = torch.compile(plain, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own
        with hd.distribute(
            model, batch, optimizer=sgd, plan=hd.PlanOptions(micro_batch_sizes=(4,), measure_s=0.05)
        ) as trainer:
            ran.clear()
            assert trainer.step(batch).loss == pytest.approx(expected, rel=1e-5)
            assert list(trainer.state_dict()["model"]) == list(plain.state_dict())
            assert len(trainer.graph.ops) > 1
            assert ran
    with pytest.raises(CaptureError, match="by its graph it is a mean: leave it out"):
        hd.distribute(model, batch, loss=hd.LossOptions(loss_count="sum"))


class Longest(Chooses):
    """Adds, to every sample, something of the longest one: as outputs that are padded to it do."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(tokens, lengths) + 0.01 * int(lengths.max())


def test_a_choice_for_a_whole_batch_that_the_first_one_does_not_show_is_refused_at_one_that_does() -> None:
    even = batch_of(6, 1) | {"lengths": torch.full((6,), 1)}
    loss_fn = nn.MultiMarginLoss(reduction="sum")
    with hd.distribute(
        WithLoss(Longest(), lambda out, labels: loss_fn(out.cumsum(1), labels.clamp(min=0))),
        even,
        optimizer=sgd,
        plan=hd.PlanOptions(micro_batch_sizes=(2,), measure_s=0.05),
        loss=hd.LossOptions(loss_count="sum"),
    ) as trainer:
        trainer.step(even)
        with pytest.raises(CaptureError, match=r"the batch of step 2 do not add up .* the length of the longest"):
            trainer.step(batch_of(6, 5))


def test_a_compiler_that_is_missing_is_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nmore")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(
        HeterodyneError, match=r"no code for cpu here .*No working C.. compiler found.*or leave compile out"
    ):
        hd.distribute(Plain(), {"x": torch.randn(4, 4)}, compile=True, plan=hd.PlanOptions(measure_s=1e-3))
