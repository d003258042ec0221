"""Tiny models of several kinds, each with a global batch and what `capture` would say of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.graph.ir import Block, Input, Loss, ModelGraph, Op, Parameter, TensorSpec
from heterodyne.graph.size import ZERO, Size

NAMES = ("gpt", "llama", "gpt2", "bert", "resnet", "mixed")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model ready to train, its graph, and a global batch."""

    module: nn.Module
    graph: ModelGraph
    batch: dict[str, Tensor]

    def count(self, part: Mapping[str, Tensor]) -> float:
        """What a mean over tokens counts."""
        labels = part["labels"]
        shifted = labels[:, 1:] if type(self.module).__name__ in SHIFTING else labels
        return float((shifted != -100).sum())


SHIFTING = ("TinyGPT", "LlamaForCausalLM", "GPT2LMHeadModel")


def build(name: str, samples: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Case:
    """The case of that name with a global batch of that many samples; the same in every process."""
    torch.manual_seed(seed)
    module, batch, facts = {
        "gpt": _gpt,
        "llama": _llama,
        "gpt2": _gpt2,
        "bert": _bert,
        "resnet": _resnet,
        "mixed": _mixed,
    }[name](samples)
    module = module.train().to(dtype)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    return Case(module=module, graph=graph_of(module, batch, **facts), batch=batch)


def graph_of(
    module: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    loss: Loss,
    batch_statistics: tuple[str, ...] = (),
    random: tuple[str, ...] = (),
) -> ModelGraph:
    """As capture would have it, but with one op a parameter, in the order of the modules."""
    named = list(module.named_parameters(remove_duplicate=False))
    parameters = []
    for name, p in module.named_parameters():
        aliases = tuple(other for other, q in named if q is p and other != name)
        dtype = str(p.dtype).removeprefix("torch.")
        parameters.append(
            Parameter(name=name, shape=tuple(p.shape), dtype=dtype, trainable=p.requires_grad, aliases=aliases)
        )
    ops = tuple(_op(f"op{i}", (p.name,)) for i, p in enumerate(parameters))
    return ModelGraph(
        name=type(module).__name__,
        inputs=tuple(
            Input(
                name=name,
                spec=TensorSpec(
                    shape=(Size.per_sample(1), *map(Size.of, t.shape[1:])), dtype=str(t.dtype).removeprefix("torch.")
                ),
                batch_dim=0,
            )
            for name, t in batch.items()
        ),
        parameters=tuple(parameters),
        buffers=(),
        ops=ops,
        blocks=(Block(index=0, name="all", kind="all", start=0, stop=len(ops)),),
        loss=loss,
        batch_statistics=batch_statistics,
        random=random,
    )


def _op(name: str, parameters: tuple[str, ...]) -> Op:
    return Op(
        name=name, target="aten.linear.default", inputs=(), parameters=parameters, outputs=(), module="", source="",
        flops_forward=ZERO, flops_backward=ZERO, bytes_read=ZERO, bytes_written=ZERO, bytes_saved=ZERO,
    )  # fmt: skip


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
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Mixed(nn.Module):
    """Dropout, BatchNorm over unequal counts and ignored labels, all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.dropout = nn.Dropout2d(0.3)
        self.head = nn.Conv2d(6, 5, 1)

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.dropout(F.gelu(self.norm(self.convolution(pixels))))
        return {"loss": F.cross_entropy(F.dropout(self.head(hidden), 0.1, self.training), labels)}


def _gpt(samples: int) -> tuple[nn.Module, dict[str, Tensor], dict[str, object]]:
    ids = torch.randint(0, 23, (samples, 8))
    return TinyGPT(), {"input_ids": ids, "labels": ids}, {"loss": Loss(reduction="mean")}


def _llama(samples: int) -> tuple[nn.Module, dict[str, Tensor], dict[str, object]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    ids = torch.randint(0, 29, (samples, 8))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, {"loss": Loss(reduction="mean")}


def _gpt2(samples: int) -> tuple[nn.Module, dict[str, Tensor], dict[str, object]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=29, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    ids = torch.randint(0, 29, (samples, 8))
    facts = {"loss": Loss(reduction="mean"), "random": ("dropout",)}
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, facts


def _bert(samples: int) -> tuple[nn.Module, dict[str, Tensor], dict[str, object]]:
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
    facts = {"loss": Loss(reduction="mean", count="tokens"), "random": ("dropout",)}
    return BertForMaskedLM(config), {"input_ids": ids, "attention_mask": mask, "labels": labels}, facts


def _resnet(samples: int) -> tuple[nn.Module, dict[str, Tensor], dict[str, object]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=5, num_channels=3
    )
    batch = {"pixel_values": torch.randn(samples, 3, 16, 16), "labels": torch.randint(0, 5, (samples,))}
    return (
        ResNetForImageClassification(config),
        batch,
        {"loss": Loss(reduction="mean"), "batch_statistics": ("batch_norm",)},
    )


def _mixed(samples: int) -> tuple[nn.Module, dict[str, Tensor], dict[str, object]]:
    labels = torch.randint(0, 5, (samples, 4, 4))
    labels = labels.masked_fill(torch.rand(samples, 4, 4) < 0.4, -100)
    labels[0] = -100
    labels[-1, 0, 0] = 1
    facts = {
        "loss": Loss(reduction="mean", count="tokens"),
        "batch_statistics": ("batch_norm",),
        "random": ("dropout",),
    }
    return Mixed(), {"pixels": torch.randn(samples, 3, 4, 4) + 5.0, "labels": labels}, facts


def without_dropout(graph: ModelGraph) -> ModelGraph:
    return dataclasses.replace(graph, random=())
