"""Tiny models of several kinds, each with a global batch and what `capture` would say of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heterodyne as hd
from heterodyne.frontend import Captured, trace
from heterodyne.graph.ir import ModelGraph
from heterodyne.loss_count import CountedBy, LossCount
from multiprocess.split import moe_model

NAMES = ("gpt", "sum", "weighted", "llama", "gpt2", "bert", "resnet", "mixed")
MIXING = ("resnet", "mixed")  # those with BatchNorm
BRANCHED = ("t5", "vit", "unet")  # and more, whose stages hang together in other ways than a chain does, or see no text
EXPERTS = (
    "mixtral",
    "qwen3_moe",
    "moe_einsum",
    "moe_indexed",
)  # mixtures: two of Transformers, two as a user writes them

COUPLED = ("contrastive", "similar", "router", "deviation")  # losses in which samples see each other
TERMS = ("terms", "pretraining")  # losses that add terms with denominators of their own

SHIFTING = ("llama", "gpt2", "mixtral", "qwen3_moe", "marked_mixtral")  # predict each label from the tokens before it


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model ready to train, its graph, and a global batch."""

    module: nn.Module
    graph: ModelGraph
    batch: dict[str, Tensor]

    @property
    def count(self) -> LossCount:
        """What the loss divides by, counted by hand where it has one denominator."""
        if self.graph.name in (*TERMS, *COUPLED):
            return capture_of(self.graph.name).loss_count
        return CountedBy(self._counted, self.graph.loss)

    def _counted(self, part: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> float:
        labels = part["labels"]
        if self.graph.name == "weighted":
            return float(buffers["weights"][labels].double().sum())
        return float(((labels[:, 1:] if self.graph.name in SHIFTING else labels) != -100).sum())


def build(graph: ModelGraph, samples: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Case:
    """The case of that graph with a global batch of that many samples; the same in every process."""
    module, batch = _make(graph.name, samples, seed)
    module = module.train().to(dtype)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    return Case(module=module, graph=graph, batch=batch)


def _make(name: str, samples: int, seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(seed)
    return makers()[name](samples)


def makers() -> dict[str, Callable[[int], tuple[nn.Module, dict[str, Tensor]]]]:
    """By the name of the case what makes it, given how many samples."""
    return {
        "gpt": _gpt,
        "llama": _llama,
        "gpt2": _gpt2,
        "bert": _bert,
        "marked": _marked,
        "resnet": _resnet,
        "mixed": _mixed,
        "custom": _custom,
        "pairs": _pairs,
        "transformer": _transformer,
        "attention": _attention,
        "sum": _sum,
        "weighted": _weighted,
        "seen": _seen,
        "t5": _t5,
        "vit": _vit,
        "unet": _unet,
        "mixtral": _mixtral,
        "marked_mixtral": _marked_mixtral,
        "qwen3_moe": _qwen3_moe,
        "moe_einsum": functools.partial(_moe, "einsum"),
        "contrastive": _contrastive,
        "similar": _similar,
        "router": _router,
        "deviation": _deviation,
        "terms": _terms,
        "pretraining": _pretraining,
        "moe_indexed": functools.partial(_moe, "indexed"),
    }


_asked: list[Callable[[str], ModelGraph]] = []


@functools.cache
def captured(name: str) -> ModelGraph:
    """What `capture` says of a case; its size does not matter. Slow once, so jobs on workers are given it."""
    return _asked[-1](name) if _asked else capture_of(name).graph


@contextmanager
def captured_by(ask: Callable[[str], ModelGraph]) -> Iterator[None]:
    """While the block runs, `captured` asks a process that has captured the case, or that will need it anyway."""
    _asked.append(ask)
    yield
    _asked.pop()


@functools.cache
def capture_of(name: str) -> Captured:
    module, batch = _make(name, 4, 0)
    return trace(module.train(), batch, name=name)


class TinyGPT(nn.Module):
    """One attention layer, tied embeddings, a frozen scale and a parameter that the loss does not reach."""

    def __init__(self, width: int = 16, vocabulary: int = 23, length: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        query, key, value = self.qkv(self.norm(hidden)).unsqueeze(1).chunk(3, -1)
        hidden = hidden + self.scale * self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0])
        logits = self.head(hidden)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none").mean()


class Summed(nn.Module):
    """A loss that is a sum over the samples, returned first of a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, points: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        found = self.layers(points).squeeze(-1)
        return F.mse_loss(found, targets, reduction="sum"), found


class Seen(nn.Module):
    """What it reads of its weights last are views that it makes first, some of views, one of weights of another; one has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 5)
        self.places = nn.Parameter(torch.randn(9, 6))
        self.bias = nn.Parameter(torch.randn(6, 6).t())
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        turned, places, bias = self.head.weight.t(), self.places[:6], self.bias.reshape(-1)
        rows = places.unsqueeze(0)
        hidden = torch.tanh(self.first(points))
        hidden = torch.tanh(hidden @ rows[0] + bias[:6])
        hidden = torch.tanh(hidden * 0.7) @ places
        return F.cross_entropy(hidden @ turned + self.head.bias, labels) + self.none.sum()


class Weighted(nn.Module):
    """Classes that count more or less than others."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("weights", torch.tensor([0.1, 1.0, 4.0]))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(points), labels, self.weights)


class Mixed(nn.Module):
    """Dropout, noise, stochastic depth, BatchNorm over unequal counts and ignored labels, all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.dropout = nn.Dropout2d(0.3)
        self.head = nn.Conv2d(6, 5, 1)

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.dropout(F.gelu(self.norm(self.convolution(pixels))))
        hidden = (
            hidden
            + 0.1 * torch.randn_like(hidden) * torch.rand(len(hidden), 1, 1, 1, device=hidden.device).add(0.8).floor()
        )
        return {"loss": F.cross_entropy(F.dropout(self.head(hidden), 0.1, self.training), labels)}


class UNet(nn.Module):
    """Skips over several stages: what is made first is read last."""

    def __init__(self, widths: tuple[int, ...] = (4, 6, 8)) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(i, o, 2, stride=2) for i, o in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.join = nn.ModuleList(nn.Conv2d(2 * o, o, 3, padding=1) for o in widths[-2::-1])
        self.head = nn.Conv2d(widths[0], 5, 1)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        hidden = pixels
        skips: list[Tensor] = []
        for layer in self.down:
            hidden = F.relu(layer(F.max_pool2d(hidden, 2) if skips else hidden))
            skips.append(hidden)
        for up, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
            hidden = F.gelu(join(torch.cat([up(hidden), skip], 1)))
        return F.cross_entropy(self.head(hidden), labels)


class MarkedClassifier(nn.Module):
    """A backbone with BatchNorm, replicated, and a head with more classes than it has anything else, split."""

    def __init__(self, width: int = 8, classes: int = 50) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.mix = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        with hd.replicate(3):
            hidden = F.relu(self.norm(self.stem(pixels)), inplace=True).mean((2, 3))
            hidden = self.drop(F.relu(self.mix(hidden)))
        with hd.split(3):
            return F.cross_entropy(self.head(hidden), labels, label_smoothing=0.1)


class Reversed(torch.autograd.Function):
    """The gradient, reversed and bounded; a straight-through estimate forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient.clamp(-0.01, 0.01)


class Custom(nn.Module):
    """A backward that no graph of the forward shows: a function and hooks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[1].register_full_backward_hook(lambda module, into, out: (into[0] * 1.5,))
        self.layers[1].register_full_backward_pre_hook(lambda module, out: (out[0].clamp(-0.02, 0.02),))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        hidden: Tensor = Reversed.apply(3 * self.layers[0](points))  # type: ignore[no-untyped-call]
        hidden = self.layers[1](hidden)
        hidden.register_hook(lambda gradient: gradient.sign() * gradient**2)
        return F.cross_entropy(self.layers[2](hidden), labels)


def _custom(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    labels = torch.randint(0, 4, (samples,))
    labels[::3] = -100
    return Custom(), {"points": torch.randn(samples, 4), "labels": labels}


class Pairs(nn.Module):
    """Two inputs of one batch, joined for the network and taken apart again, as preferences are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 1))

    def forward(self, chosen: Tensor, rejected: Tensor, labels: Tensor) -> Tensor:
        better, worse = self.layers(torch.cat([chosen, rejected])).squeeze(-1).chunk(2)
        return -F.logsigmoid((better - worse) * labels).mean()


def _pairs(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    inputs = {"chosen": torch.randn(samples, 4), "rejected": torch.randn(samples, 4)}
    return Pairs(), {**inputs, "labels": torch.randn(samples)}


class Stock(nn.Module):
    """nn.Transformer, with a causal mask, padding and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 12)
        self.transformer = nn.Transformer(12, 6, 1, 1, 24, batch_first=True)
        self.head = nn.Linear(12, 11)

    def forward(self, ids: Tensor, padding: Tensor, labels: Tensor) -> Tensor:
        causal = self.transformer.generate_square_subsequent_mask(labels.shape[1])
        inside = self.tokens(ids), self.tokens(labels.clamp(min=0))
        hidden = self.transformer(*inside, tgt_mask=causal, tgt_is_causal=True, src_key_padding_mask=padding)
        return F.cross_entropy(self.head(hidden).transpose(1, 2), labels)


class StockLayers(nn.Module):
    """An encoder layer with norms first, the batch in dim 1 and no masks, a decoder layer, and attention that returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 12)
        self.encoder = nn.TransformerEncoderLayer(12, 6, 24, dropout=0.0, activation="gelu", norm_first=True)
        self.decoder = nn.TransformerDecoderLayer(12, 3, 18, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(12, 6, batch_first=True)
        self.head = nn.Linear(12, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.encoder(self.tokens(ids).transpose(0, 1)).transpose(0, 1)
        hidden = self.decoder(self.tokens(labels.clamp(min=0)), hidden)
        hidden, weights = self.attention(hidden, hidden, hidden)
        return F.cross_entropy((self.head(hidden) + weights.sum(1)[..., None]).transpose(1, 2), labels)


def _texts(samples: int) -> dict[str, Tensor]:
    labels = torch.randint(0, 11, (samples, 5))
    labels[::3, 2:] = -100
    return {"ids": torch.randint(0, 11, (samples, 5)), "labels": labels}


def _transformer(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    padding = torch.zeros(samples, 5, dtype=torch.bool)
    padding[1::2, 3:] = True
    texts = _texts(samples)
    return Stock(), {"ids": texts["ids"], "padding": padding, "labels": texts["labels"]}


def _attention(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return StockLayers(), _texts(samples)


def _marked(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return MarkedClassifier(), {"pixels": torch.randn(samples, 3, 6, 6), "labels": torch.randint(0, 50, (samples,))}


def _gpt(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    ids = torch.randint(0, 23, (samples, 8))
    return TinyGPT(), {"input_ids": ids, "labels": ids.clone()}


def _llama(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    ids = torch.randint(0, 29, (samples, 8))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def _mixtral(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, num_local_experts=5, num_experts_per_tok=2,
    )  # fmt: skip
    ids = torch.randint(0, 29, (samples, 8))
    return MixtralForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


class Split(nn.Module):
    """A part of a model, marked to be split."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Tensor) -> Tensor:
        with hd.split(2, name="experts"):
            result: Tensor = self.inner(*arguments)
            return result


def _marked_mixtral(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    module, batch = _mixtral(samples)
    for layer in module.model.layers:  # type: ignore[union-attr]  # that is where Transformers keeps them
        layer.mlp.experts = Split(layer.mlp.experts)  # type: ignore[union-attr]
    return module, batch


def _qwen3_moe(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=16, num_experts=6,
        num_experts_per_tok=3, norm_topk_prob=True,
    )  # fmt: skip
    ids = torch.randint(0, 29, (samples, 8))
    return Qwen3MoeForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def _moe(form: Literal["einsum", "indexed"], samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    ids = torch.randint(0, 23, (samples, 8))
    return moe_model.build(form), {"input_ids": ids, "labels": ids.roll(-1, 1)}


def _gpt2(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=29, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    ids = torch.randint(0, 29, (samples, 8))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def _bert(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=29, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16,
    )  # fmt: skip
    ids = torch.randint(0, 29, (samples, 8))
    labels = ids.masked_fill(torch.rand(samples, 8) < 0.7, -100)
    labels[0] = -100  # a sample without any label that counts
    labels[-1, 0] = 3
    mask = torch.ones(samples, 8, dtype=torch.long)
    mask[1::2, 6:] = 0
    return BertForMaskedLM(config), {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Terms(nn.Module):
    """Tokens that are labelled, a mean over the samples, a guarded count that its numerator does not vanish with, and a penalty."""

    def __init__(self, width: int = 12, vocabulary: int = 17) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)
        self.score = nn.Linear(width, 1)

    def forward(self, input_ids: Tensor, labels: Tensor, scores: Tensor, found: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.tokens(input_ids)))
        score = self.score(hidden).squeeze(-1)
        token = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        objects = F.binary_cross_entropy_with_logits(score, found, reduction="sum") / found.sum().clamp(min=1)
        return token + 0.5 * F.mse_loss(score.mean(1), scores) + 0.1 * objects + 1e-2 * self.head.weight.square().sum()


def _terms(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    ids = torch.randint(0, 17, (samples, 6))
    labels = ids.masked_fill(torch.rand(samples, 6) < 0.5, -100)
    found = (torch.rand(samples, 6) < 0.3).float()
    labels[0], found[0] = -100, 0.0  # a sample that counts nothing
    labels[-1, 0] = 3
    return Terms(), {"input_ids": ids, "labels": labels, "scores": torch.randn(samples), "found": found}


class Contrastive(nn.Module):
    """Two towers whose outputs are compared over the batch, as CLIP's are; labels of one sample each, and a penalty."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width))
        self.texts = nn.Sequential(nn.Embedding(11, width), nn.Dropout(0.3))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        image = F.normalize(self.images(images), dim=-1)
        text = F.normalize(self.texts(texts).mean(1), dim=-1)
        logits = self.scale.exp() * image @ text.T
        labels = torch.arange(logits.shape[0])
        both = F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)
        return both / 2 + 1e-2 * self.images[0].weight.square().sum()


class Similar(nn.Module):
    """SimCLR's loss over two views of each sample, joined to one batch, with the labels as further positives."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, first: Tensor, second: Tensor, labels: Tensor) -> Tensor:
        views = F.normalize(self.encoder(torch.cat([first, second])), dim=-1)
        alone = torch.eye(len(views), dtype=torch.bool)
        similarity = (views @ views.T / 0.5).masked_fill(alone, -1e9)
        positive = (labels.repeat(2)[:, None] == labels.repeat(2)).float() * ~alone
        return -(similarity.log_softmax(-1) * positive).sum() / positive.sum()


class Deviation(nn.Module):
    """The root of a mean of squares, and a spread over the batch (VICReg): no quotient of sums over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        found = self.layers(first)
        centred = found - found.mean(0)
        spread = F.relu(1 - (centred.square().mean(0) + 1e-4).sqrt()).mean()
        return F.mse_loss(found, second).sqrt() + spread


def _contrastive(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return Contrastive(), {"images": torch.randn(samples, 6), "texts": torch.randint(0, 11, (samples, 4))}


def _similar(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    views = {"first": torch.randn(samples, 6), "second": torch.randn(samples, 6)}
    return Similar(), {**views, "labels": torch.randint(0, 3, (samples,))}


def _deviation(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return Deviation(), {"first": torch.randn(samples, 6), "second": torch.randn(samples, 5)}


def _router(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A mixture whose loss balances its experts: a product of two means over the tokens of the batch."""
    model, batch = _mixtral(samples)
    model.config.output_router_logits = True
    return model, batch


def _pretraining(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertForPreTraining

    masked, batch = _bert(samples)
    following = torch.randint(0, 2, (samples,))
    return BertForPreTraining(masked.config), {**batch, "next_sentence_label": following}


def _resnet(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=5, num_channels=3
    )
    batch = {"pixel_values": torch.randn(samples, 3, 16, 16), "labels": torch.randint(0, 5, (samples,))}
    return ResNetForImageClassification(config), batch


def _t5(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=29, d_model=16, d_ff=24, d_kv=8, num_layers=1, num_decoder_layers=2, num_heads=2, dropout_rate=0.1,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    labels = torch.randint(0, 29, (samples, 6)).masked_fill(torch.rand(samples, 6) < 0.3, -100)
    labels[-1, 0] = 3
    return T5ForConditionalGeneration(config), {"input_ids": torch.randint(0, 29, (samples, 8)), "labels": labels}


def _vit(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
        hidden_dropout_prob=0.1, num_labels=5,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(samples, 3, 16, 16), "labels": torch.randint(0, 5, (samples,))}
    return ViTForImageClassification(config), batch


def _unet(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    labels = torch.randint(0, 5, (samples, 8, 8)).masked_fill(torch.rand(samples, 8, 8) < 0.4, -100)
    return UNet(), {"pixels": torch.randn(samples, 3, 8, 8), "labels": labels}


def _mixed(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    labels = torch.randint(0, 5, (samples, 4, 4))
    labels = labels.masked_fill(torch.rand(samples, 4, 4) < 0.4, -100)
    labels[0] = -100
    labels[-1, 0, 0] = 1
    return Mixed(), {"pixels": torch.randn(samples, 3, 4, 4) + 5.0, "labels": labels}


def _sum(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return Summed(), {"points": torch.randn(samples, 4), "targets": torch.randn(samples)}


def _seen(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return Seen(), {"points": torch.randn(samples, 4), "labels": torch.randint(5, (samples,))}


def _weighted(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return Weighted(), {"points": torch.randn(samples, 4), "labels": torch.randint(0, 3, (samples,))}
