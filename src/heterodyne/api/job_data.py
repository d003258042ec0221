"""What the ``data`` section of a job names, as training data: one function for each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import default_collate

from heterodyne.errors import DataError, JobError
from heterodyne.factories import call_factory
from heterodyne.job import Job
from heterodyne.runtime.data.corpus import JsonLines, PaddedDocuments, Source, TextFiles, text_sources
from heterodyne.runtime.data.dataset import DatasetSource, is_map_style
from heterodyne.runtime.data.images import ImageFolder
from heterodyne.runtime.data.packing import PackedRows
from heterodyne.runtime.data.source import DataSource
from heterodyne.runtime.data.stream import StreamSource
from heterodyne.runtime.data.text import TextData
from heterodyne.runtime.data.tokenizer import has_tokenizer, load_tokenizer, open_tokenized
from heterodyne.runtime.data.tokens import TokenFile, open_token_file, open_tokens

__all__ = ["data_of"]

Say = Callable[[str], None]
Paths = str | tuple[str, ...]
_PREFETCH = 2


def data_of(job: Job, base: Path, cache: Path, *, say: Say) -> DataSource:
    """The data of a job. Any process may call this at any time. Raises DataError or JobError.

    Args:
        base: where relative paths start.
        cache: the directory of token files.
        say: is informed when text is read and why.
    """
    if job.data.kind == "dataset":
        return _dataset(job, base)
    if job.data.kind == "images":
        return _images(job, base)
    if job.data.kind != "tokens" and job.data.packing is False:
        return _documents(job, base)
    return _tokens(job, base, cache, say)


def _tokens(job: Job, base: Path, cache: Path, say: Say) -> TextData:
    """Text that is one long row of tokens: bytes, tokens of a tokenizer, or a token file."""
    data = job.data
    paths: Paths = getattr(data, data.kind)

    def opened(paths: Paths) -> TokenFile:
        if data.kind == "tokens":
            if not isinstance(paths, str):
                raise DataError("data.tokens and its validation are one file each")
            return open_token_file(base / paths, dtype=data.token_dtype or "uint16")
        sources = text_sources(paths, base=base)
        directory = _tokenizer(job, base)
        if directory is None:
            return open_tokens(sources, cache, say=say)
        documents: Iterable[str] = _texts(job, sources)
        form = f"{data.kind} {data.field or 'text'}"
        return open_tokenized(sources, lambda: documents, directory, cache, form=form, say=say)

    return TextData(
        file=opened(paths),
        sequence_length=data.sequence_length,
        validation_fraction=data.validation_fraction,
        batch_size=job.training.global_batch_size,
        seed=job.training.seed,
        validation=None if data.validation is None else opened(data.validation),
    )


def _documents(job: Job, base: Path) -> DatasetSource:
    """One document a sample, padded."""
    data = job.data
    paths, directory = getattr(data, data.kind), _tokenizer(job, base)
    if directory is None:
        raise DataError("data.packing: false needs a tokenizer, which says what to pad with: set data.tokenizer")
    tokenizer = load_tokenizer(directory)

    def padded(paths: Paths) -> PaddedDocuments:
        texts = _texts(job, text_sources(paths, base=base))
        return PaddedDocuments(documents=texts, tokenizer=tokenizer, length=data.sequence_length)

    return _map_style(job, padded(paths), None if data.validation is None else padded(data.validation))


def _images(job: Job, base: Path) -> DatasetSource:
    def folder(path: Any) -> ImageFolder:
        if not isinstance(path, str):
            raise DataError("data.images and its validation are one directory each")
        return ImageFolder(directory=base / path, size=job.data.image_size or 224)

    training = folder(job.data.images)
    validation = None if job.data.validation is None else folder(job.data.validation)
    if validation is not None and validation.classes != training.classes:
        raise DataError("data.validation has other folders than data.images: both need the same classes")
    return _map_style(job, training, validation)


def _dataset(job: Job, base: Path) -> DataSource:
    """Return what the user's function returns."""
    data = job.data
    given, collate = _called(str(data.dataset), job, base)
    validation = None
    if data.validation is not None:
        if not isinstance(data.validation, str):
            raise JobError("data.validation: with data.dataset it is one function, as path/to/file.py:function")
        validation, _ = _called(data.validation, job, base)
    if is_map_style(given):
        if data.shuffle_buffer is not None:
            raise JobError("data.shuffle_buffer goes with a stream; a dataset that has a length is shuffled as a whole")
        if data.packing:
            given = PackedRows(given, data.sequence_length, getattr(given, "lengths", None))
            validation = None if validation is None else PackedRows(validation, data.sequence_length)
        return _map_style(job, given, validation, collate)
    if not (hasattr(given, "__iter__") or callable(given)):
        raise JobError(
            f"data.dataset: {data.dataset} returned a {type(given).__name__}; return something with __len__ and __getitem__, or an "
            "iterable, or a pair of one and a collator"
        )
    if data.validation is None and "validation_fraction" in data.model_fields_set and data.validation_fraction:
        raise JobError(
            "data.validation_fraction: no part of a stream can be kept apart; name another one as data.validation"
        )
    if data.balance:
        raise JobError("data.balance: the lengths of a stream are not known before it is read; use data.packing")
    return StreamSource(
        given,
        batch_size=job.training.global_batch_size,
        seed=job.training.seed,
        shuffle_buffer=data.shuffle_buffer or 0,
        packed_length=data.sequence_length if data.packing else None,
        collate=collate,
        validation=validation,
        name=str(data.dataset),
        workers=data.workers,
        prefetch=data.prefetch or _PREFETCH,
    )


def _map_style(job: Job, dataset: Any, validation: Any, collate: Any = default_collate) -> DatasetSource:
    lengths = getattr(dataset, "lengths", None) if job.data.balance or collate is not default_collate else None
    if job.data.balance and lengths is None:
        raise JobError(
            "data.balance: the dataset has no attribute lengths; give it one, with the tokens of each sample"
        )
    return DatasetSource(
        dataset=dataset,
        batch_size=job.training.global_batch_size,
        seed=job.training.seed,
        collate=collate,
        validation=validation,
        validation_fraction=job.data.validation_fraction,
        validation_lengths=None if lengths is None else getattr(validation, "lengths", None),
        lengths=lengths,
        balance=bool(job.data.balance),
        workers=job.data.workers,
        prefetch=job.data.prefetch or _PREFETCH,
        sequence_length=job.data.sequence_length if isinstance(dataset, PackedRows | PaddedDocuments) else None,
        name=f"{job.data.kind} {job.data.dataset or ''}".strip(),
    )


def _called(factory: str, job: Job, base: Path) -> tuple[Any, Any]:
    """The dataset that a function of the user's returns, and its collator."""
    given = call_factory(factory, job.data.arguments or {}, base=base, key="data.dataset")
    if isinstance(given, tuple) and len(given) == 2 and callable(given[1]):
        return given
    return given, default_collate


def _texts(job: Job, sources: tuple[Source, ...]) -> Any:
    if job.data.kind == "text":
        return TextFiles(sources=sources)
    return JsonLines(sources=sources, field=job.data.field or "text")


def _tokenizer(job: Job, base: Path) -> Path | None:
    """The directory of the tokenizer; None for bytes. A pretrained model is never given bytes for its tokens."""
    if job.data.tokenizer is not None:
        return base / job.data.tokenizer
    if job.model.directory is None:
        if job.data.kind == "jsonl":
            raise DataError("data.jsonl needs a tokenizer: set data.tokenizer to a local Hugging Face directory")
        return None
    directory = base / job.model.directory
    if not has_tokenizer(directory):
        raise DataError(
            f"the model in {directory} was trained on tokens, and there is no tokenizer beside it: set data.tokenizer to the directory "
            "of its tokenizer, or give token files as data.tokens"
        )
    return directory
