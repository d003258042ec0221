"""How a loss is averaged, for the many ways in which people write one; and the ways that no weighting can serve."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterodyne.errors import CaptureError, DataError
from heterodyne.frontend import Captured, trace
from heterodyne.graph import Loss

SAMPLES = Loss(reduction="mean", count="samples")
TOKENS = Loss(reduction="mean", count="tokens")
SUM = Loss(reduction="sum")

LossFunction = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Logits of 5 classes for 6 tokens a sample, and a loss of them."""

    weights: Tensor

    def __init__(self, loss: LossFunction) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("weights", torch.tensor([0.5, 1.0, 2.0, 1.0, 3.0]))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return self.loss(self, self.linear(x), y, mask)


def batch_of(samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    y = torch.randint(5, (samples, 6), generator=generator)
    y[torch.rand(y.shape, generator=generator) < 0.3] = -100
    mask = (torch.rand(samples, 6, generator=generator) < 0.6).float()
    return {"x": torch.randn(samples, 6, 3, generator=generator), "y": y, "mask": mask}


def capture_net(loss: LossFunction) -> tuple[Net, Captured]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net(loss)
    return net, trace(net, batch_of(3))


def flat(z: Tensor) -> Tensor:
    return z.reshape(-1, z.shape[-1])


def per_token(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.transpose(1, 2), y, reduction="none")


KNOWN: dict[str, tuple[LossFunction, Loss]] = {
    "cross entropy": (lambda n, z, y, m: F.cross_entropy(flat(z), y.view(-1)), TOKENS),
    "cross entropy with classes in dim 1": (lambda n, z, y, m: F.cross_entropy(z.transpose(1, 2), y), TOKENS),
    "shifted labels": (lambda n, z, y, m: F.cross_entropy(flat(z[:, :-1]), y[:, 1:].reshape(-1)), TOKENS),
    "another ignored label": (
        lambda n, z, y, m: F.cross_entropy(flat(z), y.clamp(min=0).view(-1), ignore_index=0),
        TOKENS,
    ),
    "class weights": (lambda n, z, y, m: F.cross_entropy(flat(z), y.view(-1), weight=n.weights), TOKENS),
    "label smoothing": (lambda n, z, y, m: F.cross_entropy(flat(z), y.view(-1), label_smoothing=0.1), TOKENS),
    "nll": (lambda n, z, y, m: F.nll_loss(flat(z).log_softmax(-1), y.view(-1)), TOKENS),
    "probabilities as target": (lambda n, z, y, m: F.cross_entropy(flat(z), flat(z).detach().softmax(-1)), SAMPLES),
    "sum of cross entropy": (lambda n, z, y, m: F.cross_entropy(flat(z), y.view(-1), reduction="sum"), SUM),
    "mean": (lambda n, z, y, m: (z**2).mean(), SAMPLES),
    "mean of each sample, then of all": (lambda n, z, y, m: (z**2).mean((1, 2)).mean(), SAMPLES),
    "mean over samples first": (lambda n, z, y, m: (z**2).mean(0).sum(), SAMPLES),
    "sum over a sample, mean over samples": (lambda n, z, y, m: z.sum((1, 2)).mean(), SAMPLES),
    "mse": (lambda n, z, y, m: F.mse_loss(z[..., 0], m), SAMPLES),
    "l1": (lambda n, z, y, m: F.l1_loss(z[..., 0], m), SAMPLES),
    "huber": (lambda n, z, y, m: F.huber_loss(z[..., 0], m), SAMPLES),
    "bce with logits": (lambda n, z, y, m: F.binary_cross_entropy_with_logits(z[..., 0], m), SAMPLES),
    "bce": (lambda n, z, y, m: F.binary_cross_entropy(z[..., 0].sigmoid(), m), SAMPLES),
    "kl by batch": (
        lambda n, z, y, m: F.kl_div(z.log_softmax(-1), z.detach().softmax(-1), reduction="batchmean"),
        SAMPLES,
    ),
    "sum": (lambda n, z, y, m: (z**2).sum(), SUM),
    "sum of squares": (lambda n, z, y, m: F.mse_loss(z[..., 0], m, reduction="sum"), SUM),
    "sum over the number of samples": (lambda n, z, y, m: (z**2).sum() / z.shape[0], SAMPLES),
    "sum over the number of elements": (lambda n, z, y, m: (z**2).sum() / z.numel(), SAMPLES),
    "mean times the number of samples": (lambda n, z, y, m: (z**2).mean() * z.shape[0], SUM),
    "sum over a mask": (lambda n, z, y, m: (z[..., 0] ** 2 * m).sum() / m.sum(), TOKENS),
    "sum over a guarded mask": (lambda n, z, y, m: (z[..., 0] ** 2 * m).sum() / m.sum().clamp(min=1), TOKENS),
    "sum over a mask and a bit": (lambda n, z, y, m: (z[..., 0] ** 2 * m).sum() / (m.sum() + 1e-8), TOKENS),
    "divided before it is summed": (lambda n, z, y, m: (z[..., 0] ** 2 * m / m.sum()).sum(), TOKENS),
    "none, masked by the labels": (lambda n, z, y, m: per_token(z, y).sum() / (y != -100).sum(), TOKENS),
    "mean over the mask of each sample": (
        lambda n, z, y, m: ((z[..., 0] ** 2 * m).sum(1) / (m.sum(1) + 1)).mean(),
        SAMPLES,
    ),
    "times constants": (lambda n, z, y, m: -2 * F.cross_entropy(flat(z), y.view(-1)) / 3, TOKENS),
    "two terms of one count": (
        lambda n, z, y, m: F.cross_entropy(flat(z), y.view(-1)) + 0.1 * F.cross_entropy(flat(z * 2), y.view(-1)),
        TOKENS,
    ),
    "a mean and a penalty on weights": (lambda n, z, y, m: (z**2).mean() + 0.1 * n.linear.weight.pow(2).sum(), SAMPLES),
    "learned weight of a term": (lambda n, z, y, m: (z**2).mean() * torch.exp(-n.scale) + n.scale, SAMPLES),
    "softmax and running sums within a sample": (lambda n, z, y, m: (z.softmax(-1) + z.cumsum(1)).mean(), SAMPLES),
    "stacked terms": (lambda n, z, y, m: torch.stack([(z**2).mean(), z.abs().mean()]).mean(), SAMPLES),
    "in double precision": (lambda n, z, y, m: (z.double() ** 2).mean().float(), SAMPLES),
}


@pytest.mark.parametrize("name", KNOWN)
def test_parts_weighted_by_the_count_add_up_to_the_whole(name: str) -> None:
    loss, expected = KNOWN[name]
    net, captured = capture_net(loss)
    assert captured.graph.loss == expected
    batch = batch_of(5)
    net(**batch).backward()
    whole = {n: p.grad for n, p in net.named_parameters()}
    net.zero_grad()
    for part in (slice(0, 1), slice(1, 5)):
        piece = {key: value[part] for key, value in batch.items()}
        weight = 1.0 if expected.reduction == "sum" else captured.loss_count(piece) / captured.loss_count(batch)
        (net(**piece) * weight).backward()
    for n, p in net.named_parameters():
        torch.testing.assert_close(p.grad, whole[n], rtol=1e-4, atol=1e-6)
    counts = [captured.loss_count({k: v[part] for k, v in batch.items()}) for part in (slice(0, 2), slice(2, 5))]
    assert sum(counts) == pytest.approx(captured.loss_count(batch)), "a count adds up over the parts"


UNKNOWN: dict[str, tuple[LossFunction, str]] = {
    "two counts": (
        lambda n, z, y, m: F.cross_entropy(flat(z), y.view(-1)) + (z[..., 0] * m).sum() / m.sum(),
        "different denominators",
    ),
    "a count and the samples": (
        lambda n, z, y, m: F.cross_entropy(flat(z), y.view(-1)) + (z**2).mean(),
        "different denominators",
    ),
    "a mean divided by a count": (lambda n, z, y, m: (z**2).mean() / m.sum(), "after it was averaged"),
    "a count that the model makes": (
        lambda n, z, y, m: (z**2).sum() / (z[..., 0] > 0).sum(),
        "depends on the weights",
    ),
    "a root of a mean": (lambda n, z, y, m: (z**2).mean().sqrt(), "cannot be told how the loss is averaged: aten.sqrt"),
    "a greatest loss": (lambda n, z, y, m: (z**2).mean((1, 2)).max(), "cannot be told"),
    "a quotient of sums": (lambda n, z, y, m: z.sum() / m.sum().sqrt(), "cannot be told"),
    "a mean inside": (lambda n, z, y, m: (z - z.mean(0)).pow(2).mean(), "samples of a batch depend on each other"),
    "a mean inside that has no gradient": (
        lambda n, z, y, m: (z - z.detach().mean(0)).pow(2).mean(),
        "samples of a batch depend on each other",
    ),
    "inputs normalised over the batch": (
        lambda n, z, y, m: (z[..., 0] * (m - m.mean()) / m.std()).pow(2).mean(),
        "samples of a batch depend on each other",
    ),
    "softmax over the samples": (lambda n, z, y, m: z.softmax(0).pow(2).mean(), "depend on each other"),
    "a running sum over the samples": (lambda n, z, y, m: z.cumsum(-3).pow(2).mean(), "depend on each other"),
    "each sample mixed with another": (lambda n, z, y, m: (z + z.flip(0)).pow(2).mean(), "depend on each other"),
    "each sample mixed with the next": (lambda n, z, y, m: (z + z.roll(1, 0)).pow(2).mean(), "depend on each other"),
    "all elements moved by one": (lambda n, z, y, m: (z + z.roll(1)).pow(2).mean(), "depend on each other"),
    "differences of neighbours": (lambda n, z, y, m: (z[1:] - z[:-1]).pow(2).sum(), "depend on each other"),
    "attention over the samples": (
        lambda n, z, y, m: F.scaled_dot_product_attention(*[z.transpose(0, 1)] * 3).pow(2).mean(),
        "samples of a batch depend on each other",
    ),
    "samples against samples": (
        lambda n, z, y, m: (z.flatten(1) @ z.flatten(1).T).softmax(-1).mean(),
        "samples of a batch depend on each other",
    ),
    "pairs in the batch": (
        lambda n, z, y, m: (z[: z.shape[0] // 2] - z[z.shape[0] // 2 :][: z.shape[0] // 2]).pow(2).mean(),
        "the batch is cut into parts",
    ),
    "a guard that is more than one": (
        lambda n, z, y, m: (z[..., 0] * m).sum() / m.sum().clamp(min=8),
        "cannot be told how the loss is averaged: aten.clamp",
    ),
    "a count that is bounded": (
        lambda n, z, y, m: (z[..., 0] * m).sum() / m.sum().clamp(min=1, max=20),
        "cannot be told how the loss is averaged: aten.clamp",
    ),
    "a count and much more": (
        lambda n, z, y, m: (z[..., 0] * m).sum() / (m.sum() + 1e-3),
        "plus a term that does not depend on them",
    ),
    "a mean over a batch-wide count": (lambda n, z, y, m: (z[..., 0] / m.sum()).mean(), "over the whole batch"),
    "a sum and a penalty": (lambda n, z, y, m: (z**2).sum() + n.scale**2, "does not depend on them"),
    "only the weights": (lambda n, z, y, m: n.linear.weight.pow(2).sum(), "does not depend on the"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_weights_can_serve_is_refused(name: str) -> None:
    loss, said = UNKNOWN[name]
    with pytest.raises(CaptureError, match=said) as caught:
        capture_net(loss)
    if name != "only the weights":
        assert "test_loss.py:" in str(caught.value), "the line of the model is shown"


@pytest.mark.parametrize(
    ("name", "weight"), [("sum over a guarded mask", 0.9), ("sum over a mask and a bit", 1e-4), ("sum over a mask", 0)]
)
def test_a_count_that_its_guard_would_change_is_refused(name: str, weight: float) -> None:
    _, captured = capture_net(KNOWN[name][0])
    batch = batch_of(2)
    batch["mask"].zero_()
    assert captured.loss_count(batch) == 0
    batch["mask"][0, 0] = weight
    if weight:
        with pytest.raises(DataError, match="guards its division"):
            captured.loss_count(batch)
    batch["mask"][0, 0] = 1.0
    assert captured.loss_count(batch) == 1


def test_class_weights_of_a_model_without_values_are_asked_for() -> None:
    with torch.device("meta"):
        net = Net(KNOWN["class weights"][0])
    captured = trace(net, batch_of(3))
    with pytest.raises(CaptureError, match="'weights', which has no values yet"):
        captured.loss_count(batch_of(3))
    real, expected = capture_net(KNOWN["class weights"][0])
    assert captured.loss_count(batch_of(3), dict(real.named_buffers())) == expected.loss_count(batch_of(3))


def test_a_batch_is_checked_before_it_is_counted() -> None:
    _, captured = capture_net(KNOWN["cross entropy"][0])
    with pytest.raises(CaptureError, match="the batch has no y"):
        captured.loss_count({"x": torch.zeros(1)})
    assert captured.loss_count(tuple(batch_of(4).values())) == captured.loss_count(batch_of(4))
