"""A model in files: each rank reads what it holds, and no more; training goes as from the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heterodyne.errors import JobError
from heterodyne.job import ModelSection
from heterodyne.models import build, build_stored
from heterodyne.plan.boxes import Box
from heterodyne.runtime.weights.materialise import place_weights
from multiprocess.pool import Pool, World
from multiprocess.test_measure import communicator_of

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=request.param)
    # Several files, as large models have.
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path, max_shard_size="20KB")
    return path


def section(path: Path) -> ModelSection:
    return ModelSection(directory=str(path))


def test_it_is_the_model_that_transformers_loads(directory: Path) -> None:
    whole = build(section(directory), base=Path())
    found = build_stored(section(directory), base=Path())
    assert found is not None
    model, stored = found
    assert all(p.is_meta for p in model.parameters())
    expected = dict(whole.named_parameters())
    assert dict(model.named_parameters()).keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(stored.read(name, (), torch.float32), parameter)
        rows = len(parameter)
        assert torch.equal(stored.read(name, ((0, 1, rows - 1),), torch.float32), parameter[1 : rows - 1])
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in whole.named_buffers())


def placed(world: World, path: Path) -> tuple[dict[str, Tensor], int, list[str]]:
    """Of a model whose odd parameters this rank holds if it is odd: what it has, the bytes that it has read, what it has not."""
    found = build_stored(section(path), base=Path())
    assert found is not None
    model, stored = found
    read: list[int] = []
    names = [name for name, _ in model.named_parameters()]

    class Counting:
        def __contains__(self, name: object) -> bool:
            return name in stored

        def read(self, *arguments: Any) -> Tensor:
            tensor = stored.read(*arguments)
            read.append(tensor.nbytes)
            return tensor

    def holders(name: str) -> dict[int, Box]:
        ranks = range(world.world_size)
        return {rank: () for rank in ranks if name not in names or names.index(name) % world.world_size == rank}

    with communicator_of(world) as communicator:
        place_weights(model, communicator, holders, stored=Counting())
    there = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta}
    return there, sum(read), [name for name, p in model.named_parameters() if p.is_meta]


def test_each_rank_reads_what_it_holds_and_no_more(pool: Pool, directory: Path) -> None:
    expected = dict(build(section(directory), base=Path()).named_parameters())
    seen: set[str] = set()
    for there, read, missing in pool.run(2, placed, directory):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in there.items())
        assert read == sum(tensor.nbytes for tensor in there.values()) < sum(p.nbytes for p in expected.values())
        assert there.keys() | set(missing) == expected.keys()
        seen |= there.keys()
    assert seen == expected.keys()


def test_files_with_other_tensors_are_left_to_transformers_and_broken_ones_are_named(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({f"another.{name}": tensor for name, tensor in tensors.items()}, file)
    assert build_stored(section(tmp_path), base=Path()) is None
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(JobError, match="cannot be read"):
        build_stored(section(tmp_path), base=Path())
    assert build_stored(ModelSection(factory="a:b"), base=Path()) is None
