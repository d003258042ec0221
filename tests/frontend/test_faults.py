"""Models and batches that cannot be captured: the line is shown, and what to change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from frontend.by_hand import assert_gradients, eager, piped
from heterodyne.api.distributing import distribute
from heterodyne.api.model_source import copies_of
from heterodyne.errors import CaptureError, HeterodyneError
from heterodyne.frontend import capture, loss_of, trace


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Chooses(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # a choice by value
            y = y * 2
        return y.mean()


class ReadsANumber(Model):
    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * x.max().item()).mean()  # a number


class CountsByValue(Model):
    def forward(self, x: Tensor) -> Tensor:
        wanted = int(x.sum())  # a size
        return self.linear(x)[:wanted].mean()


class Selects(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y[x > 0].mean()  # a selection


class LeavesTorch(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).detach().cpu().numpy()  # numpy
        return torch.from_numpy(y.cumsum(0).astype("float32")).mean().tolist()


class FixesTheBatch(Model):
    def forward(self, x: Tensor) -> Tensor:
        total = self.linear.bias.sum() * 0
        for sample in range(x.shape[0]):  # a loop over samples
            total = total + self.linear(x[sample]).mean()
        return total / x.shape[0]


class ListsTheBatch(Model):
    """Not the model compares the size with a number, but an op of torch that it calls."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(list(self.linear(x))).mean()  # a list of samples


class RefusesTheBatch(Model):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] != 4:
            raise ValueError("only four samples")  # its own check
        return self.linear(x).mean()


class Pairs(Model):
    def forward(self, x: Tensor) -> Tensor:
        a, b = self.linear(x).chunk(2, dim=0)  # halves
        return (a - b).pow(2).mean()


class Maps(Model):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.linear)(x).mean()  # a map


@pytest.mark.parametrize(
    ("model", "line", "remedy"),
    [
        (Maps, "# a map", "for all rows at once"),
        (Chooses, "if y.sum() > 0:  # a choice by value", "torch.where"),
        (ReadsANumber, "# a number", "keep numbers as tensors"),
        (CountsByValue, "# a size", "keep numbers as tensors"),
        (Selects, "# a selection", "a mask in place of selecting"),
        (LeavesTorch, "# numpy", "numpy"),
        (FixesTheBatch, "# a loop over samples", "x.shape"),
        (ListsTheBatch, "# a list of samples", "x.shape"),
        (RefusesTheBatch, "# its own check", "any number of samples"),
        (Pairs, "# halves", "further dimension"),
    ],
)
def test_the_line_and_the_remedy_are_shown(
    model: type[nn.Module], line: str, remedy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model(), (torch.zeros(4, 4),))
    message = str(caught.value)
    assert "test_faults.py:" in message
    assert line in message
    assert remedy in message
    printed = capfd.readouterr()
    assert printed.out + printed.err == "", "torch.export's own reports are kept back"


class LikelihoodOf(nn.Module):
    """Returns mean and spread of a number for each sample."""

    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, spread = self.linear(x).unbind(-1)
        return self.loss(mean, F.softplus(spread), y)


@pytest.mark.parametrize(
    "loss",
    [
        lambda mean, spread, y: -Normal(mean, spread).log_prob(y).mean(),
        lambda mean, spread, y: -Normal(mean, spread, validate_args=True).log_prob(y).mean(),
        lambda mean, spread, y: F.gaussian_nll_loss(mean, y, spread),
    ],
)
def test_checks_that_torch_makes_of_values_do_not_hinder_a_trace(loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = LikelihoodOf(loss)
    batch = {"x": torch.randn(4, 4), "y": torch.randn(4)}
    captured = trace(model, batch)
    assert captured.graph.loss.reduction == "mean"
    found, gradients = piped(captured, [0, len(captured.graph.ops) // 2], model, batch)
    expected, of_model = eager(model, batch)
    torch.testing.assert_close(found, expected)
    assert_gradients(gradients, of_model, rtol=1e-5, atol=1e-7)


def test_a_target_that_the_model_does_not_take_is_told_to_belong_to_a_loss() -> None:
    for batch in ((torch.zeros(4, 4), torch.zeros(4)), {"x": torch.zeros(4, 4), "y": torch.zeros(4)}):
        with pytest.raises(CaptureError, match=r"cannot be called with these inputs(?s:.*)loss=\.\.\.\)"):
            capture(Returns(lambda y: y.mean()), batch)
    with pytest.raises(HeterodyneError, match=r"the class MSELoss; make one of it: loss=MSELoss\(\)"):
        distribute(nn.Linear(4, 4), (torch.zeros(4, 4), torch.zeros(4)), loss=nn.MSELoss)


def test_what_torch_itself_reads_out_of_a_tensor_is_told_as_its_own() -> None:
    class Averaged(Model):
        def __init__(self, momentum: float | None) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4, momentum=momentum)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x)).pow(3).mean()

    with pytest.raises(CaptureError, match=r"BatchNorm with momentum=None .* Give it a momentum, as momentum=0.1"):
        capture(Averaged(None), (torch.zeros(4, 4),))
    capture(Averaged(0.1), (torch.zeros(4, 4),))


def test_a_lazy_module_is_to_be_called_first() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    with pytest.raises(CaptureError, match=r"'0\.weight' of Sequential has no shape yet.*Call the model once"):
        capture(model, (torch.zeros(4, 4),))
    with pytest.raises(CaptureError, match=r"'0\.weight' of Sequential has no shape yet.*Call the model once"):
        copies_of(model)


def test_a_batch_norm_that_exchanges_by_itself_is_refused() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.SyncBatchNorm(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).square().mean()

    model, batch = Images(), (torch.zeros(4, 3, 2, 2),)
    with pytest.raises(CaptureError, match=r"'norm' of Images is a SyncBatchNorm.*Take BatchNorm1d"):
        capture(model, batch)
    capture(model.eval(), batch)


def _two_layers(tie: Callable[[nn.Linear, nn.Linear], None]) -> nn.Module:
    class Two(Model):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(4, 4)
            tie(self.linear, self.other)

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.linear(x)).mean()

    return Two()


def _data_of(a: nn.Linear, b: nn.Linear) -> None:
    b.weight.data = a.weight.data


def _transposed(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = nn.Parameter(a.weight.data.t())


def _kept(a: nn.Linear, b: nn.Linear) -> None:
    b.register_buffer("before", a.weight.data)


def _attribute(a: nn.Linear, b: nn.Linear) -> None:
    b.frozen = [a.weight.detach()]  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("tie", "other"),
    [
        (_data_of, "other.weight"),
        (_transposed, "other.weight"),
        (_kept, "other.before"),
        (_attribute, r"other.frozen\[0\]"),
    ],
)
def test_parameters_that_are_tied_by_their_memory_are_refused(
    tie: Callable[[nn.Linear, nn.Linear], None], other: str
) -> None:
    for take in (lambda model: capture(model, (torch.zeros(4, 4),)), copies_of):
        with pytest.raises(CaptureError, match=rf"'linear\.weight' and '{other}' .* in the same memory"):
            take(_two_layers(tie))


@pytest.mark.parametrize("columns", [False, True])
def test_parameters_side_by_side_in_one_memory_are_not(columns: bool) -> None:
    def side_by_side(a: nn.Linear, b: nn.Linear) -> None:
        both = torch.randn(8, 4).view(4, 8) if columns else torch.randn(8, 4)
        a.weight.data, b.weight.data = (both[:, :4], both[:, 4:]) if columns else (both[:4], both[4:])

    capture(_two_layers(side_by_side), (torch.zeros(4, 4),))


class Returns(Model):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return self.what(self.linear(x))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda y: {"logits": y}, "a dict with the keys logits, which holds no loss"),
        (lambda y: None, "the model returned None"),
        (lambda y: (), "a tuple, which holds no loss"),
        (lambda y: y, "not one floating point number"),
        (lambda y: y.argmax(), "torch.int64"),
        (lambda y: y.mean().item, "holds no loss"),
    ],
)
def test_what_is_no_loss_is_said(what: Any, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(Returns(what), (torch.zeros(4, 4),))


@pytest.mark.tour("model_output.py")
@pytest.mark.parametrize(
    "what",
    [
        lambda y: y.mean(),
        lambda y: {"loss": y.mean(), "logits": y},
        lambda y: (y.mean(), y),
        lambda y: [y.mean()],
    ],
)
def test_every_way_to_return_a_loss(what: Any) -> None:
    assert capture(Returns(what), (torch.zeros(4, 4),)).loss.count == "samples"
    assert loss_of(what(torch.ones(2, 2))).item() == 1


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((), "is empty"),
        ((torch.zeros(3, 4), 0.5), "'scale' is 0.5, a float; every input of a batch is a tensor"),
        ((torch.zeros(3, 4), None), "'scale' is None"),
        ((torch.zeros(3, 4), torch.zeros(5, 4)), r"no common batch dimension: x \[3, 4\], scale \[5, 4\]"),
        ((torch.zeros(()), torch.zeros(())), "no common batch dimension"),
        ((torch.zeros(0, 4),), "no samples"),
    ],
)
def test_batches_that_are_none(batch: tuple[Any, ...], said: str) -> None:
    class Scaled(Model):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return (self.linear(x) * scale).mean()

    with pytest.raises(CaptureError, match=said):
        capture(Scaled(), batch)


def test_a_table_of_as_many_rows_as_the_batch_is_told_to_be_shared() -> None:
    class Codes(Model):
        def forward(self, x: Tensor, codes: Tensor) -> Tensor:
            return self.linear((x @ codes.t()).softmax(-1) @ codes).pow(2).mean()

    batch = {"x": torch.zeros(6, 4), "codes": torch.zeros(6, 4)}
    with pytest.raises(CaptureError, match=r"see each other(?s:.*)pass shared=\('codes',\)"):
        capture(Codes(), batch)
    assert capture(Codes(), batch, shared=("codes",)).loss.reduction == "mean"
    with pytest.raises(CaptureError, match="shared names code, and the inputs are x, codes"):
        capture(Codes(), batch, shared=("code",))


def test_bags_that_are_told_by_their_offsets_are_refused() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.EmbeddingBag(20, 4)
            self.head = nn.Linear(4, 1)
            self.register_buffer("ramp", torch.zeros(()))

        def forward(self, text: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
            return (self.head(self.ramp * self.bags(text, offsets)).squeeze(-1) - y).pow(2).mean()

    with pytest.raises(CaptureError, match="takes rows of the batch by their numbers"):
        capture(
            Bags(), {"text": torch.zeros(23, dtype=torch.long), "offsets": torch.arange(8) * 2, "y": torch.zeros(8)}
        )


def test_a_model_that_cannot_be_copied_says_why() -> None:
    class Locked(Model):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).mean()

    with pytest.raises(CaptureError, match="lock"):
        capture(Locked(), (torch.zeros(2, 4),))
