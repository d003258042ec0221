"""Small models of many kinds, each with a batch that makes it return its loss."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS = 16
VOCABULARY = 64


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        q, k, v = (part.view(samples, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(samples, tokens, width))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A plain decoder with tied embeddings; positions are made inside forward, on the default device."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


Case = tuple[nn.Module, dict[str, Tensor]]


def text_batch(samples: int = 3, *, ignore: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(2, VOCABULARY, (samples, TOKENS), generator=generator)
    labels = ids.clone()
    if ignore:
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return {"input_ids": ids, "labels": labels}


def image_batch(samples: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "pixel_values": torch.rand(samples, 3, 32, 32, generator=generator),
        "labels": torch.randint(5, (samples,), generator=generator),
    }


def hugging_face(auto_class: str, model_type: str, **fields: Any) -> nn.Module:
    import transformers

    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    if model_type in ("vit", "resnet"):
        special = {"num_labels": 5}
    configuration = transformers.AutoConfig.for_model(model_type, **special, **fields)
    configuration.use_cache = False
    model = getattr(transformers, auto_class).from_config(configuration)
    assert isinstance(model, nn.Module)
    return model.train()


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> Case:
    return hugging_face("AutoModelForCausalLM", "llama", **_DECODER), text_batch()


def mixtral() -> Case:
    return hugging_face("AutoModelForCausalLM", "mixtral", **_DECODER, num_local_experts=4), text_batch()


def gpt2() -> Case:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "loss_type": "ForCausalLM"}
    size = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": TOKENS}
    return hugging_face("AutoModelForCausalLM", "gpt2", **size, **off), text_batch()


def bert() -> Case:
    size = {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hugging_face("AutoModelForMaskedLM", "bert", **size, **off), text_batch()


def t5() -> Case:
    size = {"vocab_size": VOCABULARY, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    model = hugging_face("AutoModelForSeq2SeqLM", "t5", **size, decoder_start_token_id=0, dropout_rate=0.0)
    return model, text_batch()


def vit() -> Case:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hugging_face("AutoModelForImageClassification", "vit", **size, image_size=32, patch_size=8), image_batch()


def resnet() -> Case:
    size = {"embedding_size": 8, "hidden_sizes": [8, 16, 32], "depths": [2, 3, 2], "layer_type": "basic"}
    return hugging_face("AutoModelForImageClassification", "resnet", **size), image_batch()


def gpt() -> Case:
    return GPT(), text_batch()


CASES: dict[str, Callable[[], Case]] = {
    case.__name__: case for case in (gpt, llama, gpt2, bert, t5, vit, mixtral, resnet)
}


class UNet(nn.Module):
    """Skips over several stages: what goes down is read again on the way up, first made, last read."""

    def __init__(self, widths: tuple[int, ...] = (4, 8, 12)) -> None:
        super().__init__()
        inwards = (3, *widths[:-1])
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.ReLU(inplace=True))
            for i, o in zip(inwards, widths, strict=True)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(i, o, 2, stride=2) for i, o in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.join = nn.ModuleList(nn.Conv2d(2 * o, o, 3, padding=1) for o in widths[-2::-1])
        self.head = nn.Conv2d(widths[0], 5, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        skips, x = [], pixel_values
        for layer in self.down:
            x = layer(x)
            skips.append(x)
            x = F.max_pool2d(x, 2) if len(skips) < len(self.down) else x
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = up(x)
            x += 0.5  # in place, as user code does
            x = join(torch.cat([x, skips.pop()], dim=1))
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(2), labels[:, None].expand(-1, logits[0, 0].numel()))}


def unet() -> Case:
    return UNet(), image_batch()


def example_gpt() -> Case:
    """The model of the main job, as a user's file."""
    file = Path(__file__).parents[2] / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("example_gpt", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build(vocabulary=VOCABULARY, length=TOKENS, width=32, layers=2, heads=4), text_batch()


MORE: dict[str, Callable[[], Case]] = {case.__name__: case for case in (unet, example_gpt)}


def build(name: str) -> Case:
    """A case with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {**CASES, **MORE}[name]()


@cache
def _built(name: str) -> Case:
    return build(name)


def fresh(name: str) -> Case:
    """A copy of `build`, which costs less than to build it again."""
    model, batch = _built(name)
    return copy.deepcopy(model), batch
