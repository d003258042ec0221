"""Models of the layers that come with torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unseen.family import NO_GRAPH, VOCABULARY, Batch, Family, classes, masked

__all__ = ["FAMILIES"]

WIDTH = 16


class Sides(nn.Module):
    """`nn.Transformer` with padding in the source; ``causal`` None: it is to find out what its mask is."""

    def __init__(self, *, causal: bool | None) -> None:
        super().__init__()
        self.causal = causal
        self.source = nn.Embedding(VOCABULARY, WIDTH)
        self.target = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Transformer(WIDTH, 4, 1, 1, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        padding = source == 0
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.inner(
            self.source(source), self.target(target), tgt_mask=causal, tgt_is_causal=self.causal,
            src_key_padding_mask=padding.float() * -1e9, memory_key_padding_mask=padding.float() * -1e9,
        )  # fmt: skip
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Encoder(nn.Module):
    """`nn.TransformerEncoder`, the norm first or not."""

    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 24, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.layers(self.tokens(ids), src_key_padding_mask=ids == 0)
        return F.cross_entropy(self.head(hidden.mean(1)), labels, label_smoothing=0.1)


class Decoder(nn.Module):
    """`nn.TransformerDecoderLayer` over what an image gives."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerDecoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, pixels: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        memory = self.patches(pixels).flatten(2).transpose(1, 2)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        hidden = self.layer(self.tokens(ids), memory, tgt_mask=causal)
        return F.cross_entropy(self.head(hidden).transpose(1, 2), labels)


class Attention(nn.Module):
    """`nn.MultiheadAttention` with the sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, points: Tensor, targets: Tensor) -> Tensor:
        hidden = self.into(points).transpose(0, 1)
        mixed, weights = self.attention(hidden, hidden, hidden)
        hidden = self.norm(hidden + mixed).transpose(0, 1)
        return F.smooth_l1_loss(self.out(hidden).squeeze(-1), targets) + 0.01 * weights.square().mean()


class Recurrent(nn.Module):
    """A language model of two recurrent layers."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = kind(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.layers(self.tokens(ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)


def _ids(samples: int) -> Tensor:
    ids = torch.randint(1, VOCABULARY, (samples, 8))
    ids[1::2, 6:] = 0
    return ids


def _pair(samples: int) -> Batch:
    target = torch.randint(1, VOCABULARY, (samples, 6))
    return {"source": _ids(samples), "target": target, "labels": masked(target.roll(-1, 1))}


def _classified(samples: int) -> Batch:
    return {"ids": _ids(samples), "labels": classes(samples)}


def _captions(samples: int) -> Batch:
    ids = torch.randint(1, VOCABULARY, (samples, 6))
    return {"pixels": torch.randn(samples, 3, 8, 8), "ids": ids, "labels": masked(ids.roll(-1, 1))}


def _points(samples: int) -> Batch:
    return {"points": torch.randn(samples, 8, 6), "targets": torch.randn(samples, 8)}


def _text(samples: int) -> Batch:
    ids = torch.randint(1, VOCABULARY, (samples, 8))
    return {"ids": ids, "labels": masked(ids.roll(-1, 1))}


FAMILIES = (
    Family(name="nn.Transformer", build=lambda: Sides(causal=True), batch=_pair),
    Family(
        name="nn.Transformer, mask compared",
        build=lambda: Sides(causal=None),
        batch=_pair,
        impossible=NO_GRAPH,
        count=lambda part: (part["labels"] != -100).sum(),
    ),
    Family(name="nn.TransformerEncoder", build=lambda: Encoder(norm_first=False), batch=_classified),
    Family(name="nn.TransformerEncoder, norm first", build=lambda: Encoder(norm_first=True), batch=_classified),
    Family(name="nn.TransformerDecoderLayer", build=Decoder, batch=_captions),
    Family(name="nn.MultiheadAttention", build=Attention, batch=_points),
    Family(name="nn.LSTM", build=lambda: Recurrent(nn.LSTM), batch=_text),
    Family(name="nn.GRU", build=lambda: Recurrent(nn.GRU), batch=_text),
)
