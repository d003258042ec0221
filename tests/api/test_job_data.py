"""Every kind of data that a job can name, read as the command line reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heterodyne.api.job_data import data_of
from heterodyne.errors import HeterodyneError, JobError
from heterodyne.job import Job
from heterodyne.runtime.data.source import DataSource

DATASET = """
import torch

def squares(count=20):
    return [{"x": torch.tensor(float(n)), "labels": torch.tensor(float(n * n))} for n in range(count)]

def documents():
    return [list(range(n, n + 5)) for n in range(20)]

def padded():
    return documents(), lambda samples: {"input_ids": torch.tensor(samples)}

def stream():
    return lambda: iter(documents())

class Uneven(list):
    lengths = [5] * 20

def uneven():
    return Uneven(squares())

def number():
    return 3

class Endless(Uneven):
    def __len__(self):
        raise RuntimeError("who knows")

def broken():
    return number() / 0

class Short:
    def __len__(self):
        return 20
    def __getitem__(self, index):
        return [1, 2, 3][index]
"""


def opened(place: Path, data: dict[str, Any], **model: Any) -> DataSource:
    job = Job.model_validate(
        {"model": model or {"factory": "a:b"}, "data": data, "training": {"global_batch_size": 4, "seed": 1}}
    )
    return data_of(job, place, place / "cache", say=lambda _: None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("data")
    (path / "own.py").write_text(DATASET)
    words = {word: number for number, word in enumerate(["<end>", "<pad>", "?", "one", "two", "three"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", unk_token="?"
    ).save_pretrained(path / "words")
    (path / "text.jsonl").write_text("".join(json.dumps({"text": "one two three"}) + "\n\n" for _ in range(40)))
    (path / "bare").mkdir()
    np.arange(500, dtype=np.uint16).tofile(path / "tokens.bin")
    (path / "odd.bin").write_bytes((path / "tokens.bin").read_bytes()[:-1])
    np.save(path / "tokens.npy", np.arange(500, dtype=np.uint32))
    (path / "cut.npy").write_bytes((path / "tokens.npy").read_bytes()[:-1000])
    for name in ("cat", "dog"):
        (path / "pictures" / name).mkdir(parents=True)
        for number in range(4):
            color = (255, 0, 0) if name == "cat" else (0, 0, 255)
            Image.new("RGB", (5, 7), color).save(path / "pictures" / name / f"{number}.png")
    return path


def test_tokens_come_from_the_tokenizer_that_is_named_or_that_is_beside_the_model(place: Path) -> None:
    for data, model in (({"tokenizer": "words"}, {}), ({}, {"directory": "words"})):
        source = opened(place, {"jsonl": "text.jsonl", "sequence_length": 8, **data}, **model)
        ids = source.batch(0).samples(0, 4)["input_ids"]
        assert {tuple(row) for row in ids.tolist()} == {(3, 4, 5, 0, 3, 4, 5, 0)}
        assert (source.vocabulary(), source.sequence_length) == (6, 8)


def test_documents_are_padded_where_they_are_not_packed(place: Path) -> None:
    source = opened(place, {"jsonl": "text.jsonl", "tokenizer": "words", "sequence_length": 5, "packing": False})
    batch = source.batch(0).samples(0, 4)
    assert batch["input_ids"][0].tolist() == [3, 4, 5, 1, 1]
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 0, 0]
    assert batch["labels"][0].tolist() == [3, 4, 5, -100, -100]


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npy"])
def test_token_files_are_taken_as_they_are(place: Path, name: str) -> None:
    source = opened(place, {"tokens": name, "sequence_length": 10})
    ids = source.batch(0).samples(0, 4)["input_ids"]
    assert (ids == ids[:, :1] + torch.arange(10)).all()
    assert (ids[:, 0] % 10 == 0).all()
    assert source.vocabulary() == 500


def test_a_model_that_was_trained_on_tokens_is_never_given_bytes(place: Path) -> None:
    (place / "plain.txt").write_text("one two " * 500)
    with pytest.raises(HeterodyneError, match=r"no tokenizer beside it: set data\.tokenizer"):
        opened(place, {"text": "plain.txt"}, directory="bare")
    assert opened(place, {"text": "plain.txt"}).vocabulary() == 256


def test_images_have_the_number_of_their_folder(place: Path, tmp_path: Path) -> None:
    source = opened(place, {"images": "pictures", "image_size": 4, "validation_fraction": 0.25})
    batch = source.batch(0).samples(0, 4)
    assert batch["pixel_values"].shape == (4, 3, 4, 4)
    red = batch["pixel_values"][:, 0, 0, 0] > 0
    assert torch.equal(red, batch["labels"] == 0)
    assert [part.size for part in source.validation_batches(9)] == [2]
    assert source.sequence_length is None
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "0.png").write_bytes(b"no picture")
    with pytest.raises(HeterodyneError, match=r"sample 0 of the dataset: .*cat/0\.png cannot be read as an image"):
        opened(place, {"images": str(tmp_path), "validation_fraction": 0}).batch(0).samples(0, 1)


def test_a_dataset_that_is_shorter_than_it_says_is_asked_about_it(place: Path) -> None:
    with pytest.raises(HeterodyneError, match=r"(?s)IndexError: .*own\.py:\d+.*its __len__ is 20: is that true"):
        opened(place, {"dataset": "own.py:Short"}).batch(0).samples(0, 4)


def test_a_function_returns_a_dataset_a_stream_or_either_with_a_collator(place: Path) -> None:
    batch = opened(place, {"dataset": "own.py:squares", "arguments": {"count": 40}}).batch(0).samples(0, 4)
    assert torch.equal(batch["x"] ** 2, batch["labels"])
    assert opened(place, {"dataset": "own.py:padded"}).batch(0).samples(0, 3)["input_ids"].shape == (3, 5)
    assert opened(place, {"dataset": "own.py:uneven", "balance": True}).batch(0).size == 4
    for function in ("documents", "stream"):
        data = {
            "dataset": f"own.py:{function}",
            "packing": True,
            "sequence_length": 3,
            "validation": f"own.py:{function}",
        }
        source = opened(place, data)
        assert source.batch(2).samples(1, 3)["labels"].shape == (3, 3)
        assert sum(part.size for part in source.validation_batches(7)) == 7


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"dataset": "own.py:missing"}, "data.dataset: own.py has no function 'missing'"),
        ({"dataset": "own.py:squares", "arguments": {"n": 1}}, "data.arguments: got an unexpected keyword argument 'n'"),
        ({"dataset": "own.py:number"}, "returned a int; return something with __len__"),
        ({"dataset": "own.py:squares", "balance": True}, "has no attribute lengths"),
        ({"dataset": "own.py:squares", "shuffle_buffer": 9}, "shuffle_buffer goes with a stream"),
        ({"dataset": "own.py:stream", "validation_fraction": 0.1}, "no part of a stream can be kept apart"),
        ({"jsonl": "text.jsonl"}, "data.jsonl needs a tokenizer"),
        ({"jsonl": "text.jsonl", "tokenizer": "bare"}, "has no tokenizer"),
        ({"jsonl": "text.jsonl", "tokenizer": "words", "field": "body"}, "text.jsonl:1: there is no text in the field 'body'"),
        ({"tokens": "gone.npy"}, "gone.npy cannot be read"),
        ({"tokens": "odd.bin"}, "odd.bin has 999 bytes, which is no whole number of uint16 tokens: it was cut short"),
        ({"tokens": "cut.npy"}, "cut.npy has 1128 bytes and is no whole .npy file: it was cut short"),
        ({"images": "bare"}, "has no folders"),
        ({"dataset": "own.py:Endless"}, "the __len__ of the dataset fails: RuntimeError: who knows\n"),
        ({"dataset": "own.py:broken"}, "own.py:broken failed with ZeroDivisionError"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_key(place: Path, data: dict[str, Any], says: str) -> None:
    with pytest.raises(HeterodyneError) as caught:
        opened(place, data)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("{text: a, tokens: b}", "give at most one of text, jsonl, tokens, dataset, images (given: text, tokens)"),
        ("{tokens: b, tokenizer: c}", "tokenizer goes with text or jsonl, not with tokens"),
        ("{images: b, packing: true}", "packing goes with text or jsonl or dataset, not with images"),
        ("{tokens: b, workers: 1}", "workers goes with dataset or images or text or jsonl, not with tokens"),
        ("{text: b, workers: 1}", "workers go with packing: false; packed text is memory-mapped"),
        ("{dataset: b, prefetch: 1}", "prefetch is what workers have ready: set workers too"),
    ],
)
def test_keys_that_do_not_go_together_are_refused_with_their_line(tmp_path: Path, data: str, says: str) -> None:
    (tmp_path / "job.yaml").write_text(f"model: {{factory: a:b}}\ndata: {data}\n")
    with pytest.raises(JobError) as caught:
        Job.load(tmp_path / "job.yaml")
    assert says in str(caught.value)
    assert caught.value.line == 2
