"""The Python of the documentation runs as it stands, page by page, in one process."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import heterodyne as hd

ROOT = Path(__file__).resolve().parents[2]


def code_of(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


def what_the_readme_takes_for_granted() -> dict[str, Any]:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean()

    batch = {"x": torch.randn(8, 4)}
    return {"torch": torch, "model": Model(), "example_batch": batch, "batches": [batch, batch]}


def test_the_reference_of_the_api_is_that_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8") == generate.api_page(), (
        "run docs/generate.py"
    )


def one_rank() -> dict[str, Any]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return {}


def lightning() -> dict[str, Any]:
    return {"L": pytest.importorskip("lightning")}


@pytest.mark.parametrize(
    ("page", "known"),
    [
        ("README.md", what_the_readme_takes_for_granted),
        ("docs/own-loop.md", dict),
        ("docs/install.md", dict),
        ("docs/data.md", dict),
        ("docs/ddp.md", one_rank),
        ("docs/split.md", dict),
        ("docs/sites.md", dict),
        ("docs/lightning.md", lightning),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(does not have many workers|logging interval|LeafSpec|Checkpoint directory)")
def test_its_code_runs(page: str, known: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {"torch": torch, "hd": hd, **known()}
    try:
        exec(compile(code_of(page), page, "exec"), values)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if "result" in values:
        assert values["result"].loss == values["result"].loss
