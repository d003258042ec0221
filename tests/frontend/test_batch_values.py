"""Sizes and places as values: refused, with the line, where a part of the batch would have others; allowed where they do no harm."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterodyne.errors import CaptureError
from heterodyne.frontend import trace
from heterodyne.frontend.batch_values import batch_values
from heterodyne.frontend.example import read_example
from heterodyne.frontend.export import export

Change = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    """A hidden state of 5 tokens and 4 features a sample, changed in some way; ``last``: a token of each sample."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.behind = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(64, 4))
        self.change = change

    def forward(self, x: Tensor, last: Tensor) -> Tensor:
        return self.change(self, self.linear(x), last).pow(2).mean()


BATCH = {"x": torch.zeros(2, 5, 3), "last": torch.zeros(2, dtype=torch.long)}


def rows(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0])


def along_edges(h: Tensor, ends: Tensor) -> Tensor:
    """Nodes of the samples one after the other, and edges between those of a sample."""
    nodes, edges = h.flatten(0, 1), ends + h.shape[1] * rows(h)[:, None, None]
    source, target = edges[..., 0].reshape(-1), edges.unbind(-1)[1].reshape(-1)
    return nodes.index_add(0, target, nodes[source]).view_as(h)


def written(h: Tensor, value: Tensor) -> Tensor:
    mask = torch.ones(h.shape[0], h.shape[1])
    mask[:, 1:] = value
    return h * mask[..., None]


SIZES: dict[str, Change] = {
    "times the batch": lambda n, h, last: h * h.shape[0],
    "over its root": lambda n, h, last: h / h.shape[0] ** 0.5,
    "over the number of elements": lambda n, h, last: h / h.numel(),
    "plus the batch": lambda n, h, last: h + h.shape[0],
    "a fill": lambda n, h, last: h + torch.full((h.shape[0], 1, 1), h.shape[0]),
    "a fill of no dims": lambda n, h, last: h * torch.full((), h.shape[0]),
    "a tensor of it": lambda n, h, last: h * torch.tensor(h.shape[0]),
    "a bound": lambda n, h, last: h.clamp(max=h.shape[0]),
    "a sum of ones": lambda n, h, last: h / torch.ones(h.shape[0]).sum(),
    "a sum of an expanded parameter": lambda n, h, last: h + n.table[:1].expand(h.shape[0], 4).sum(0),
    "written into a mask": lambda n, h, last: written(h, torch.tensor(float(h.shape[0]))),
}
PLACES: dict[str, Change] = {
    "added": lambda n, h, last: h + rows(h)[:, None, None],
    "in the float": lambda n, h, last: h * rows(h).float().view(-1, 1, 1),
    "the first half": lambda n, h, last: torch.where(rows(h)[:, None, None] < h.shape[0] / 2, h, 2 * h),
    "the first": lambda n, h, last: torch.where(rows(h)[:, None, None] == 0, h, 2 * h),
    "a diagonal": lambda n, h, last: h + torch.eye(h.shape[0]).diagonal()[:, None, None] * rows(h)[:, None, None],
    "rows of a table": lambda n, h, last: h + n.table[rows(h)][:, None],
    "rows of an embedding": lambda n, h, last: h + F.embedding(rows(h), n.table)[:, None],
    "the first rows of a table": lambda n, h, last: h + n.table[: h.shape[0]][:, None],
    "a running count": lambda n, h, last: h * torch.ones(h.shape[0]).cumsum(0)[:, None, None],
    "rows of other samples": lambda n, h, last: h + h[(rows(h) + 1) % h.shape[0]],
    "reversed rows": lambda n, h, last: h + h[rows(h).flip(0)],
    "flat rows of others": lambda n, h, last: h.flatten(0, 1)[rows(h)],
    "bags of several samples": lambda n, h, last: h + F.embedding_bag(last.repeat(2), n.table, rows(h))[:, None],
    "bags of rows of others": lambda n, h, last: (
        h + F.embedding_bag(torch.stack([last, last], 1).flatten(), n.table, rows(h))[:, None]
    ),
    "edges to anywhere": lambda n, h, last: along_edges(h, last[:, None, None].expand(-1, 3, 2)),
    "flat rows past the end": lambda n, h, last: h.flatten(0, 1)[rows(h) * 5 + last],
}
ALLOWED: dict[str, Change] = {
    "shapes": lambda n, h, last: (
        h.view(h.shape[0], -1) + h.new_zeros(h.shape[0], 20) + torch.full((h.shape[0], 1), 2.0)
    ),
    "an expanded parameter": lambda n, h, last: torch.cat([n.table[:1].expand(h.shape[0], 1, 4), h], 1),
    "positions of tokens": lambda n, h, last: h + n.table[torch.arange(h.shape[1])],
    "positions for each sample": lambda n, h, last: h + n.table[torch.arange(5)[None].expand(h.shape[0], 5)],
    "own rows": lambda n, h, last: h[rows(h), last],
    "several own rows": lambda n, h, last: h[rows(h)[:, None], last[:, None].expand(-1, 2)],
    "own rows, written": lambda n, h, last: h.clone().index_put((rows(h), last), torch.zeros(())),
    "own rows of all tokens": lambda n, h, last: h.flatten(0, 1)[rows(h) * 5 + last.clamp(0, 4)],
    "edges of each sample": lambda n, h, last: along_edges(h, last[:, None, None].expand(-1, 3, 2) % 5),
    "neighbours of each token": lambda n, h, last: h.flatten(0, 1)[
        (h @ h.transpose(1, 2)).topk(2, -1).indices + rows(h)[:, None, None] * 5
    ],
    "bags of each sample": lambda n, h, last: h + F.embedding_bag(torch.stack([last, last], 1), n.table)[:, None],
    "all rows of all tokens": lambda n, h, last: h.flatten(0, 1)[torch.arange(h.shape[0] * h.shape[1])],
    "tokens from places": lambda n, h, last: h.flatten(0, 1) + n.table[torch.arange(h.shape[0] * 5) % 5],
    "samples from places": lambda n, h, last: h.sum(1)[torch.arange(h.shape[0] * 5) // 5],
    "all rows of the batch": lambda n, h, last: h[: h.shape[0]],
    "the sizes cancel": lambda n, h, last: h * (h.numel() // h.shape[0]),
    "a row of equal ones": lambda n, h, last: h * torch.ones(h.shape[0], 5)[0, :, None],
    "a mean of equal rows": lambda n, h, last: h * torch.ones(h.shape[0]).mean(),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_number_of_samples_as_a_value_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="computes with the number of samples") as caught:
        trace(Net(SIZES[name]), BATCH)
    assert "test_batch_values.py:" in str(caught.value), "the line of the model is shown"


@pytest.mark.parametrize("name", PLACES)
def test_the_place_of_a_sample_as_a_value_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="computes with the places of the samples") as caught:
        trace(Net(PLACES[name]), BATCH)
    assert "test_batch_values.py:" in str(caught.value)


@pytest.mark.parametrize("name", ALLOWED)
def test_sizes_that_make_shapes_and_places_that_choose_own_rows_are_exact(name: str) -> None:
    net = Net(ALLOWED[name])
    trace(net, BATCH)
    batch = {"x": torch.randn(5, 5, 3), "last": torch.tensor([1, 4, 0, 2, 3])}
    parts = [net(**{key: value[part] for key, value in batch.items()}) for part in (slice(0, 2), slice(2, 5))]
    torch.testing.assert_close((2 * parts[0] + 3 * parts[1]) / 5, net(**batch))


JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "chunks": lambda z, last: torch.sub(*z.chunk(2)),
    "halves": lambda z, last: z[: len(z) // 2] - z[len(last) :],
    "a view": lambda z, last: z.view(2, -1, 5, 4)[0] * z.view(2, -1, 5, 4)[1],
    "sizes": lambda z, last: torch.mul(*z.split(len(last))),
}
MIXED: dict[str, Change] = {
    "neighbours of what was joined": lambda n, h, last: torch.cat([h, -h]).view(-1, 2, 5, 4).prod(1),
    "the first rows of all tokens": lambda n, h, last: h.flatten(0, 1)[: h.shape[0]],
    "samples turned into tokens": lambda n, h, last: h + h.transpose(0, 1).reshape(h.shape),
    "other rows joined": lambda n, h, last: torch.cat([h, h * 2]) * torch.stack([h, h], 1).flatten(0, 1),
}


OF_ALL: dict[str, Change] = {
    "places over the greatest length": lambda n, h, last: h + (torch.arange(5) / last.max())[:, None],
    "a mask up to the greatest length": lambda n, h, last: h * (torch.arange(5) < last.max())[:, None],
    "whether any is large": lambda n, h, last: torch.where((h.abs() > 4).any(), h * 0, h),
    "whether all are equal": lambda n, h, last: h.masked_fill((last == last[0]).all(), 0.0),
    "a count that multiplies": lambda n, h, last: h * (1 + (last > 2).sum()),
    "a count of each class, of one's own": lambda n, h, last: h * F.one_hot(last, 5).sum(0)[last][:, None, None],
    "how many have its class": lambda n, h, last: h * ((last[:, None] == last).sum(1) > 2)[:, None, None],
    "rows of a table by a count": lambda n, h, last: h + n.table[(last > 2).sum(0, keepdim=True)],
    "the number of the first sample": lambda n, h, last: h * last[0],
    "counts that are added up in place": lambda n, h, last: (
        h * torch.zeros(5, dtype=torch.long).index_add_(0, last, torch.ones_like(last))[:, None]
    ),
}


@pytest.mark.parametrize("name", OF_ALL)
def test_an_integer_or_truth_value_of_all_samples_is_refused_where_something_is_computed_with_it(name: str) -> None:
    """These pass any comparison on a batch in which the value of each part is that of the whole."""
    with pytest.raises(CaptureError, match="see each other") as caught:
        trace(Net(lambda n, h, last: n.behind(OF_ALL[name](n, h, last))), BATCH)
    assert "test_batch_values.py:" in str(caught.value)


def table_of(h: Tensor) -> Tensor:
    return h.sum(1)


NUMBERED: dict[str, Change] = {
    "rows": lambda n, h, last: h + h[last],
    "rows, taken": lambda n, h, last: h + h.take(last[:, None, None].expand(-1, 5, 4)),
    "rows, selected": lambda n, h, last: h + h.index_select(0, last),
    "rows, gathered": lambda n, h, last: h + h.gather(0, last[:, None, None].expand(-1, 5, 4)),
    "rows of all tokens": lambda n, h, last: h + h.flatten(0, 1)[last][:, None],
    "rows of places": lambda n, h, last: h + h[rows(h)[last]],
    "rows at random": lambda n, h, last: h + h[(torch.rand(h.shape[0]) * h.shape[1]).long()],
    "a table made of the batch": lambda n, h, last: h + F.embedding(last, table_of(h))[:, None],
    "bags of it": lambda n, h, last: h + F.embedding_bag(torch.stack([last, last], 1), table_of(h))[:, None],
    "written": lambda n, h, last: h.index_copy(0, last, h * 2),
    "written in place": lambda n, h, last: h.clone().index_put_((last,), torch.ones(())),
    "written for all": lambda n, h, last: h.index_fill(0, torch.zeros(1, dtype=torch.long), 1.0),
    "added": lambda n, h, last: h.index_add(0, last, h),
    "added to zeros": lambda n, h, last: h + torch.zeros_like(h).index_add_(0, last, h),
    "scattered": lambda n, h, last: h.scatter_add(0, last[:, None, None].expand(-1, 5, 4), h),
    "reduced": lambda n, h, last: h.scatter_reduce(0, last[:, None, None].expand(-1, 5, 4), h, "amax"),
    "put": lambda n, h, last: h.clone().put_(last, torch.ones(h.shape[0])),
    "between samples": lambda n, h, last: (
        h + F.grid_sample(h.permute(1, 2, 0)[:, :, None], torch.zeros(5, 1, h.shape[0], 2))[:, :, 0].permute(2, 0, 1)
    ),
    "by sorted samples": lambda n, h, last: h * torch.searchsorted(h[:, 0, 0].detach(), h[:, 0, 1])[:, None, None],
}


@pytest.mark.parametrize("name", NUMBERED)
def test_rows_that_the_data_numbers_are_refused_where_no_value_shows_them(name: str) -> None:
    """Behind a factor that is zero at first no comparison of values shows them."""

    def ramped(n: Net, h: Tensor, last: Tensor) -> Tensor:
        return n.behind(h + n.ramp * NUMBERED[name](n, h, last))

    net = Net(ramped)
    net.register_buffer("ramp", torch.zeros(()))
    with pytest.raises(CaptureError, match=r"see each other|depend on each other|goes along the samples") as caught:
        trace(net, BATCH)
    assert "test_batch_values.py:" in str(caught.value)


def test_rows_that_the_data_numbers_are_of_the_whole_batch_in_a_loss_at_the_end() -> None:
    assert trace(Net(NUMBERED["rows"]), BATCH).graph.loss.reduction == "coupled"


def test_a_count_may_divide_the_loss_and_not_also_a_hidden_state() -> None:
    class Twice(Net):
        def forward(self, x: Tensor, last: Tensor) -> Tensor:
            count = last.sum()
            h = self.linear(x)
            return h.sum() / count + self.behind(h / count).exp().sum() / count

    with pytest.raises(CaptureError, match="see each other"):
        trace(Twice(lambda n, h, last: h), BATCH)


ALONG: dict[str, tuple[str, Change]] = {
    "a spectrum": ("fft_fft", lambda n, h, last: torch.fft.fft(h, dim=0).real),
    "a spectrum of all dims": ("fft_fftn", lambda n, h, last: torch.fft.fftn(h).real),
    "sorted, told no dim": ("msort", lambda n, h, last: torch.msort(h)),
    "in place": ("cumsum_", lambda n, h, last: h.clone().cumsum_(0)),
    "turned": ("rot90", lambda n, h, last: h + torch.rot90(h, 2, (0, 1))),
    "flipped": ("flipud", lambda n, h, last: h + torch.flipud(h)),
    "norms of a feature": ("renorm", lambda n, h, last: torch.renorm(h, 2, 2, 0.5)),
    "pooled": (
        "avg_pool1d",
        lambda n, h, last: F.avg_pool1d(h.transpose(0, 2), 3, stride=1, padding=1).transpose(0, 2),
    ),
    "as channels": (
        "conv1d",
        lambda n, h, last: F.conv1d(h.permute(1, 2, 0), n.table[:4, :, None].expand(-1, -1, 3), padding=1).permute(
            2, 0, 1
        ),
    ),
    "normalised in groups": ("group_norm", lambda n, h, last: F.group_norm(h.permute(1, 2, 0), 2).permute(2, 0, 1)),
}
NOT_ALONG: dict[str, Change] = {
    "a spectrum": lambda n, h, last: torch.fft.fft(h, dim=1).real + torch.fft.fft2(h).real,
    "norms of a sample": lambda n, h, last: torch.renorm(h, 2, 0, 0.5),
    "convolved, pooled and normalised": lambda n, h, last: F.group_norm(
        F.avg_pool1d(F.conv1d(h, n.table[:25].view(5, 5, 4)[..., :3], padding=1), 3, 1, 1), 5
    ),
    "turned": lambda n, h, last: h + torch.rot90(h, 2, (1, 2)) + torch.fliplr(h),
}


@pytest.mark.parametrize("name", ALONG)
def test_an_op_along_the_samples_is_named(name: str) -> None:
    op, change = ALONG[name]
    with pytest.raises(
        CaptureError, match=rf"aten.{op}\.\w+ makes the samples of a batch depend on each other"
    ) as caught:
        trace(Net(lambda n, h, last: n.behind(change(n, h, last))), BATCH)
    assert "test_batch_values.py:" in str(caught.value)


@pytest.mark.parametrize("name", NOT_ALONG)
def test_the_same_op_along_another_dim_is_not(name: str) -> None:
    assert trace(Net(NOT_ALONG[name]), BATCH).graph.loss.reduction == "mean"


@pytest.mark.parametrize("name", JOINED)
def test_inputs_of_one_batch_may_be_joined(name: str) -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: Tensor, other: Tensor, last: Tensor) -> Tensor:
            return JOINED[name](self.linear(torch.cat([x, other])), last).pow(2).mean()

    model = Pairs()
    captured = trace(model, {**BATCH, "other": BATCH["x"]})
    (joined,) = [op for op in captured.graph.ops if op.kind == "cat"]
    assert joined.samples == (None,), "which no device may cut"
    batch = {"x": torch.randn(5, 5, 3), "other": torch.randn(5, 5, 3), "last": torch.zeros(5)}
    parts = [model(**{key: value[part] for key, value in batch.items()}) for part in (slice(0, 2), slice(2, 5))]
    torch.testing.assert_close((2 * parts[0] + 3 * parts[1]) / 5, model(**batch))


@pytest.mark.parametrize("name", MIXED)
def test_rows_of_several_samples_are_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="samples of a batch depend on each other") as caught:
        trace(Net(lambda n, h, last: n.behind(MIXED[name](n, h, last))), BATCH)
    assert "test_batch_values.py:" in str(caught.value)


CHOICES: dict[str, tuple[Change, str]] = {
    "a bound": (lambda n, h, last: h * (2 if h.shape[0] > 20 else 1), "samples <= 20"),
    "odd or even, by len()": (lambda n, h, last: h * (2 if len(h) % 2 == 0 else 1), "(samples % 2) != 0"),
    "the first chunk, which torch makes": (
        lambda n, h, last: h.chunk(max(1, h.shape[0] // 4))[0],
        "max(1, samples // 4) == 1",
    ),
    "the first group, which torch makes": (
        lambda n, h, last: h.split(h.shape[0] // 6 + 6)[0],
        "((5 + samples + (samples // 6)) // (6 + (samples // 6))) == 1",
    ),
    "a fixed number of rows": (lambda n, h, last: h[:4], "samples >= 4"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_by_the_number_of_samples_is_refused_with_its_line(name: str) -> None:
    change, assumed = CHOICES[name]
    with pytest.raises(CaptureError, match=rf"test_batch_values.py:\d+: .*\n.*traced where {re.escape(assumed)}\."):
        trace(Net(change), BATCH)


def test_what_holds_for_every_number_of_samples_may_be_asked() -> None:
    def asked(n: Net, h: Tensor, last: Tensor) -> Tensor:
        assert h.shape[0] == last.shape[0] > 0
        return h * 2 if h.shape[0] == 1 else h

    trace(Net(asked), BATCH)


def test_an_op_that_fails_at_some_size_is_named_with_its_line() -> None:
    with pytest.raises(
        CaptureError, match=r"test_batch_values.py:\d+: .*topk.*\nforward fails for a batch of 2 samples"
    ) as caught:
        trace(Net(lambda n, h, last: h.sum((1, 2)).topk(3).values), BATCH)
    assert len(str(caught.value).splitlines()) == 2


def test_fractions_of_the_batch_are_refused() -> None:
    with pytest.raises(CaptureError, match="holds for one batch size alone"):
        trace(Net(lambda n, h, last: h * torch.linspace(0, 1, h.shape[0])[:, None, None]), BATCH)


def test_a_count_made_of_sizes_follows_the_batch() -> None:
    net = Net(lambda n, h, last: h.sum() / torch.ones(h.shape[0], 5).gather(1, torch.zeros(h.shape[0], 2).long()).sum())
    traced = export(net, read_example(net, BATCH))
    values = batch_values(traced)
    made = {str(node.target): node for node in traced.graph.nodes}
    for name in ("aten.ones.default", "aten.gather.default"):
        assert made[name] in values.follows
        assert made[name] not in values.samples
    (division,) = [node for node in traced.graph.nodes if str(node.target) == "aten.div.Tensor"]
    assert division in values.dependent
    assert division.args[1] in values.follows
    assert division not in batch_values(traced, known=list(traced.graph.nodes)).dependent
