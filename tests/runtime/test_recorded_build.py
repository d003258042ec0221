"""The weights of a build that is run from a record: the same bits, in the same order of draws, and never all of them at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from heterodyne.job import ModelSection
from heterodyne.models import build
from heterodyne.runtime.weights.materialise import stored_tensors
from heterodyne.runtime.weights.recorded_build import RecordedBuild

HUGGINGFACE = {
    "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 29, "n_positions": 8},
}


def tied() -> nn.Module:
    """Ties, buffers that are computed, weights that are written in parts or converted, and one of a constant."""
    model = nn.Module()
    model.first = nn.Linear(4, 8)
    model.second = nn.Linear(8, 4)
    model.head = nn.Linear(4, 8)
    model.head.weight = model.first.weight
    nn.init.orthogonal_(model.second.weight)
    nn.init.xavier_uniform_(model.second.weight[:2])
    model.register_buffer("positions", torch.arange(8).float().reciprocal().cumsum(0), persistent=False)
    model.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
    model.noise = nn.Parameter(torch.randn(3, dtype=torch.float64) * model.scale.detach().sum())
    model.wide = nn.Linear(4, 4, dtype=torch.float64)
    model.attention = nn.MultiheadAttention(4, 2)
    model.norm = nn.BatchNorm1d(4)
    return model


def seeded(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        return make()


@pytest.mark.parametrize("kind", ["tied", *HUGGINGFACE])
def test_weights_are_those_of_the_build_bit_for_bit(kind: str) -> None:
    if kind == "tied":
        made = tied
    else:
        section = ModelSection(huggingface={"model_type": kind, **HUGGINGFACE[kind]})
        made = lambda: build(section, base=Path(), seed=3)  # noqa: E731
    expected = dict(stored_tensors(seeded(made)))
    state = torch.get_rng_state()
    recorded = RecordedBuild.of(lambda: seeded(made))
    assert recorded is not None
    found = dict(recorded.weights())
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is as it was"
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.detach()), name


@pytest.mark.parametrize("kind", HUGGINGFACE)
def test_weights_are_handed_out_while_few_others_are_in_memory(kind: str) -> None:
    """Whoever lets go of them holds one layer's weights at most, though each is initialised twice."""
    section = ModelSection(huggingface={"model_type": kind, **HUGGINGFACE[kind]})
    recorded = RecordedBuild.of(lambda: build(section, base=Path(), seed=3))
    assert recorded is not None
    alive: list[tuple[weakref.ref[torch.Tensor], int]] = []
    total = largest = most = 0
    for _, tensor in recorded.weights():
        total += tensor.nbytes
        largest = max(largest, tensor.nbytes)
        alive.append((weakref.ref(tensor), tensor.nbytes))
        del tensor
        most = max(most, sum(size for held, size in alive if held() is not None))
    assert most <= 2 * largest
    assert total > 4 * largest or kind == "llama"


class Reads(nn.Linear):
    """Its weights depend on a value, as those of torch's trunc_normal_ do."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        if self.weight.sum() > 0:
            nn.init.zeros_(self.weight)


def reseeds() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(77)
        return nn.Linear(2, 2)


def after_one() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), reseeds())


def own_generator() -> nn.Module:
    model = nn.Linear(2, 2)
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("make", [Reads, after_one, own_generator])
def test_a_build_that_reads_values_or_has_draws_of_its_own_is_not_recorded(make: Callable[[], nn.Module]) -> None:
    state = torch.get_rng_state()
    assert RecordedBuild.of(make) is None
    assert torch.equal(torch.get_rng_state(), state)
