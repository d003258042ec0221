"""A model family: a small module and its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from heterodyne.frontend.opaque import CountGiven

__all__ = [
    "MIXES", "NOT_IN_A_CUT_PLAN", "NO_GRAPH", "OWN_BACKWARD", "VOCABULARY", "Batch", "Family", "classes", "image", "labelled", "masked",
    "of_config", "tokens",
]  # fmt: skip

Batch = dict[str, Tensor]
VOCABULARY, LENGTH = 32, 8

_CUTS = ("1F1B", "ZBH1", "unlike", "tensor 2", "tensor 3", "context", "mixed")
NOT_IN_A_CUT_PLAN = dict.fromkeys(_CUTS, "the samples are compared with each other")
NO_GRAPH = dict.fromkeys(_CUTS, "what runs, or how large it is, depends on values: there is no graph to cut")
OWN_BACKWARD = dict.fromkeys(
    _CUTS, "its backward is not that of its operations: no plan that cuts the model can know it"
)
MIXES = dict.fromkeys(
    ("unlike", "mixed"), "BatchNorm takes statistics over all pipelines, which must be cut at the same places"
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """``batch``: of that many samples, drawn from PyTorch's global generator, as the weights are by ``build``.

    ``impossible``: by kind of plan, why no plan of that kind can have the mathematics of one device.
    ``count``: what its loss divides by, as the user says it of a model that torch.export gives no graph of.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    impossible: Mapping[str, str] = field(default_factory=dict)
    count: CountGiven | None = None

    def module(self) -> nn.Module:
        """The same weights each time, in training mode, without dropout: no other process could draw what plain PyTorch draws."""
        torch.manual_seed(0)
        module = self.build().train()
        for part in module.modules():
            if isinstance(part, nn.Dropout | nn.Dropout1d | nn.Dropout2d):
                part.p = 0.0
            if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
                part.dropout = 0.0
        return module

    def batches(self, samples: int, count: int) -> list[Batch]:
        made = []
        for number in range(count):
            torch.manual_seed(100 + number)
            made.append(self.batch(samples))
        return made


def of_config(model: str, config: str | None = None, /, **values: Any) -> Callable[[], nn.Module]:
    """A class of Transformers on a configuration of its own, with nothing dropped."""

    def build() -> nn.Module:
        import transformers

        named = config or model.split("For")[0].removesuffix("Model").removesuffix("LMHead") + "Config"
        made = getattr(transformers, named)(**values)
        _without_dropout(made)
        built: nn.Module = getattr(transformers, model)(made)
        return built

    return build


def _without_dropout(config: Any) -> None:
    for name, value in vars(config).items():
        if isinstance(value, float) and ("drop" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict") and not isinstance(value, type):
            _without_dropout(value)


def tokens(samples: int, length: int = LENGTH, *, padded: bool = True) -> Batch:
    """Token ids, and a mask that leaves out the ends of some."""
    ids = torch.randint(3, VOCABULARY, (samples, length))
    mask = torch.ones_like(ids)
    mask[1::2, length - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids}


def masked(labels: Tensor) -> Tensor:
    """Labels of which each sample counts another number, the first none and the last at least one."""
    keep = torch.rand(labels.shape) < torch.linspace(0.2, 0.8, len(labels)).view(-1, *[1] * (labels.dim() - 1))
    labels = labels.masked_fill(~keep, -100)
    labels[0] = -100
    labels[-1].view(-1)[1] = 4
    return labels


def labelled(samples: int, length: int = LENGTH, *, padded: bool = True) -> Batch:
    """Tokens with a label each, of which many are ignored."""
    batch = tokens(samples, length, padded=padded)
    return {**batch, "labels": masked(batch["input_ids"].clone())}


def classes(samples: int, count: int = 5) -> Tensor:
    return torch.randint(0, count, (samples,))


def image(samples: int, size: int = 16, channels: int = 3) -> Tensor:
    return torch.randn(samples, channels, size, size)
