"""Final weights load elsewhere, and give the same outputs there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from heterodyne.errors import CheckpointError
from heterodyne.runtime.checkpoint.export import WEIGHTS, export_model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.tokens(ids)))
        return logits


def test_a_plain_module_loads_in_plain_pytorch_ties_and_buffers_included(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = torch.arange(11)
    model = Tied()
    model(ids)  # moves the running statistics
    model.eval()
    directory = export_model(model, tmp_path / "model")
    again = Tied().eval()
    again.load_state_dict(load_file(directory / WEIGHTS))
    assert again.head.weight is again.tokens.weight
    assert torch.equal(again(ids), model(ids))


@pytest.mark.parametrize("tied", [True, False])
def test_a_transformers_model_loads_in_transformers(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=tied
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    directory = export_model(model, tmp_path / "model")
    assert ("lm_head.weight" in load_file(directory / WEIGHTS)) != tied
    again = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = torch.arange(10)[None]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_weights_replace_those_that_are_there_and_nothing_else_is_left(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, value)
        export_model(model, tmp_path / "model")
    assert load_file(tmp_path / "model" / WEIGHTS)["weight"].unique().tolist() == [2.0]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_where_nothing_can_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="the weights cannot be written"):
        export_model(nn.Linear(1, 1), tmp_path / "file" / "model")


def test_a_state_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> str:
            return "a string"

    with pytest.raises(CheckpointError, match="_extra_state"):
        export_model(Odd(1, 1), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_what_else_is_in_the_directory_stays(tmp_path: Path) -> None:
    (tmp_path / "model" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "model" / "checkpoint-5" / "state").write_text("kept")
    (tmp_path / "model" / "model-00001-of-00002.safetensors").write_text("of older weights")
    directory = export_model(nn.Linear(2, 2), tmp_path / "model")
    assert {path.name for path in directory.iterdir()} == {"checkpoint-5", "model.safetensors"}
    assert (directory / "checkpoint-5" / "state").read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
