"""Secrets by name are kept out of what others may read."""

from __future__ import annotations

from pathlib import Path

import pytest

from heterodyne.job import Job
from heterodyne.report.run import load_run
from heterodyne.secret_names import LEFT_OUT, has_secrets, without_secrets


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "wandb_token",
        "apiKey",
        "AWS_SECRET_ACCESS_KEY",
        "token",
        "my-secret",
        "password",
        "pwd",
        "api_keys",
        "GITHUB_PAT",
        "Authorization",
        "session_cookie",
        "db_dsn",
        "auth",
        "jwt",
        "conn_str",
    ],
)
def test_a_secret_is_left_out(name: str) -> None:
    assert without_secrets({"a": [{name: "hidden"}]}) == {"a": [{name: LEFT_OUT}]}
    assert has_secrets({"a": ({name: ["hidden"]},)})


@pytest.mark.parametrize(
    "text",
    [
        "sk-proj-abcdefghijkl",
        "ghp_abcdefghijklmnop",
        "hf_abcdefghijkl",
        "https://host/x?a=1&api_key=hidden",
        "https://host/x?sig=hidden",
        "eyJhbGci.eyJzdWIi.c2lnbmF0",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE",
    ],
)
def test_what_looks_like_a_secret_is_left_out_under_any_name(text: str) -> None:
    assert "left out" in without_secrets({"x": [text]})["x"][0]
    assert "hidden" not in without_secrets(text)


def test_the_value_beside_the_name_of_a_secret_is_left_out() -> None:
    assert without_secrets({"name": "API_KEY", "value": "x"}) == {"name": "API_KEY", "value": LEFT_OUT}
    assert without_secrets({"name": "width", "value": "x"}) == {"name": "width", "value": "x"}


def test_what_only_sounds_like_one_stays() -> None:
    plain = {
        "tokens": "a.npy",
        "pad_token": "<pad>",
        "eos_token_id": 3,
        "num_key_value_heads": 2,
        "key": "a",
        "monkey": "b",
        "n_token": 5,
        "author": "c",
        "keys": ["d"],
        "path": "sketches/hf_data",
    }
    assert without_secrets(plain) == plain
    assert not has_secrets({**plain, "sizes": (1, 2)})
    assert without_secrets("https://me:hidden@host/x") == f"https://{LEFT_OUT}@host/x"


def test_neither_a_report_nor_a_checkpoint_has_it(tmp_path: Path) -> None:
    text = "model: {factory: 'm.py:f', arguments: {api_key: hidden, width: 8}}\n"
    (tmp_path / "job.yaml").write_text(text)
    shown = load_run(tmp_path).job_text
    assert "hidden" not in shown
    assert "width: 8" in shown
    assert "hidden" not in str(Job.load(tmp_path / "job.yaml").decisive)
    (tmp_path / "job.yaml").write_text(f"{text}  broken: [")
    assert "hidden" not in load_run(tmp_path).job_text
