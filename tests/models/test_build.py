"""Models from the three sources of a job, and what is said when a source is wrong."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from heterodyne.errors import JobError
from heterodyne.job import ModelSection
from heterodyne.models import build, build_count

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}

FILE = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight


def tied(width=4):
    return Tied(width)


def on_the_cpu(width=4):
    with torch.device("cpu"):
        return Tied(width)


def number():
    return 3
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(FILE)
    return tmp_path


def equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(ModelSection(factory="net.py:tied", arguments={"width": 8}), marks=pytest.mark.tour("models.py")),
        ModelSection(factory="torch.nn:Linear", arguments={"in_features": 2, "out_features": 3}),
        ModelSection(huggingface=LLAMA),
    ],
    ids=["file", "module", "huggingface"],
)
def test_the_seed_alone_decides_the_weights(base: Path, section: ModelSection) -> None:
    state = torch.random.get_rng_state()
    first = build(section, base=base, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's random state is untouched"
    torch.rand(3)
    assert equal(first, build(section, base=base, seed=1))
    assert not equal(first, build(section, base=base, seed=2))
    assert first.training


@pytest.mark.parametrize("factory", ["net.py:tied", "net.py:on_the_cpu"])
def test_on_meta_nothing_is_allocated_and_ties_stay(base: Path, factory: str) -> None:
    model = build(ModelSection(factory=factory), base=base, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert len(list(model.parameters())) == 3


def test_a_huggingface_directory_gives_its_weights(base: Path) -> None:
    original = build(ModelSection(huggingface=LLAMA), base=base, seed=3)
    original.save_pretrained(base / "saved")  # type: ignore[operator]
    section = ModelSection(directory="saved")
    assert equal(original, build(section, base=base, seed=9))
    empty = build(section, base=base, device="meta")
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    shapes = {name: p.shape for name, p in original.named_parameters()}
    assert {name: p.shape for name, p in empty.named_parameters()} == shapes
    assert equal(build(ModelSection(huggingface="saved/config.json"), base=base, seed=3), original), (
        "a configuration alone gives weights by the seed"
    )


def test_lower_precision_is_the_jobs_to_choose(base: Path) -> None:
    model = build(ModelSection(huggingface={**LLAMA, "dtype": "bfloat16"}), base=base, device="meta")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (ModelSection(factory="net.py"), "package.module:function"),
        (ModelSection(factory="net.py:tide"), "it has: .*tied"),
        (ModelSection(factory="other.py:tied"), "no file .*other.py"),
        (ModelSection(factory="no.such.module:f"), "no module 'no.such.module'"),
        (ModelSection(factory="net.py:tied", arguments={"depth": 1}), r"'depth'.*takes \(width=4\)"),
        (ModelSection(factory="net.py:number"), "returned a int, not a torch.nn.Module"),
        (ModelSection(huggingface={**LLAMA, "model_type": "lama"}), "knows no model_type 'lama'"),
        (ModelSection(huggingface={"hidden_size": 8}), "no model_type"),
        (ModelSection(huggingface={**LLAMA, "hidden_size": "many"}), "hidden_size"),
        (ModelSection(huggingface={**LLAMA, "hidden_size": 15}), "multiple of the number of attention heads"),
        (ModelSection(huggingface="missing.json"), "missing.json cannot be read"),
        (ModelSection(huggingface="net.py"), "is not JSON"),
        (ModelSection(huggingface=LLAMA, auto_class="AutoModelForPoetry"), "no 'AutoModelForPoetry'"),
        (ModelSection(huggingface=LLAMA, auto_class="AutoModelForImageClassification"), "cannot build it"),
        (ModelSection(directory="nowhere"), "config.json cannot be read"),
        (ModelSection(directory="bare"), "no \\*.safetensors"),
    ],
)
def test_a_wrong_source_is_named(base: Path, section: ModelSection, said: str) -> None:
    (base / "bare").mkdir()
    (base / "bare" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(JobError, match=said):
        build(section, base=base)


def test_what_the_loss_divides_by_may_be_a_function(base: Path) -> None:
    def count(given: str | None) -> Any:
        return build_count(ModelSection(factory="net.py:tied", loss_count=given), base=base)

    assert [count(None), count("samples"), count("sum")] == [None, "samples", "sum"]
    assert count("net.py:number")() == 3
    for given, said in (
        ("tokens", "model.loss_count 'tokens': write package.module:function"),
        ("other.py:f", "model.loss_count: there is no file"),
    ):
        with pytest.raises(JobError, match=said):
            count(given)


def test_a_file_that_cannot_be_imported_says_why(base: Path) -> None:
    (base / "broken.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(JobError, match="a_package_that_is_not_there"):
        build(ModelSection(factory="broken.py:f"), base=base)


def test_without_transformers_the_remedy_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> object:
        if name == "transformers":
            raise ImportError("No module named 'transformers'")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(JobError, match=r"pip install 'heterodyne\[huggingface\]'"):
        build(ModelSection(huggingface=LLAMA), base=base)


def test_what_lies_beside_a_file_can_be_imported_but_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("raise AssertionError('taken for the library')\n")
    (tmp_path / "beside_the_model.py").write_text("WIDTH = 3\n")
    (tmp_path / "model.py").write_text(
        "import colorsys\nimport beside_the_model\nfrom torch import nn\n"
        "def make(): return nn.Linear(beside_the_model.WIDTH, 1)\n"
    )
    assert build(ModelSection(factory="model.py:make"), base=tmp_path).in_features == 3
