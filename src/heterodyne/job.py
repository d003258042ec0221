"""The job: what to train, on what, how long, as a YAML file with seven sections.

    model data training optimizer parallelism checkpoint metrics

Nothing here says *where* it runs: that is the cluster's and the plan's part. ``--set section.field=value`` overrides any field.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from heterodyne.arguments import checked_arguments
from heterodyne.documents import Section, Whole, read_yaml, validate
from heterodyne.errors import JobError
from heterodyne.secret_names import without_secrets
from heterodyne.sync_section import OF_ANY_RUN, SyncSection
from heterodyne.tracker_options import TrackerList, TrackerOptions, tracker_options
from heterodyne.units import parse_bytes
from heterodyne.yaml_text import YamlFaultError, parse_yaml

__all__ = [
    "CheckpointSection",
    "DataSection",
    "Job",
    "MetricsSection",
    "ModelSection",
    "OptimizerName",
    "OptimizerSection",
    "ParallelismSection",
    "Reach",
    "Strategy",
    "TrainingSection",
    "decisive",
]

Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1, le=2**40)]
Positive = Annotated[Whole, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
OptimizerName = Literal["adamw", "adamw8bit", "sgd", "adafactor"]
Strategy = Literal["auto", "data", "pipeline", "split", "context", "equal", "fastest"]
Reach = Literal["element", "weight", "model"]
"""What the update of an element may depend on."""


class ModelSection(Section):
    """Exactly one of `factory`, `huggingface`, `directory`.

    Args:
        factory: ``package.module:function`` or ``path/to/file.py:function`` (relative to the job file); called with `arguments`.
        huggingface: fields of a Transformers configuration, with ``model_type``, or the path of a ``config.json``.
        directory: a local Hugging Face directory with ``config.json`` and safetensors: training continues from its weights.
        auto_class: the Transformers class that builds the model from a configuration.
        loss_count: what the loss divides by, for a model that torch.export gives no graph of: ``samples`` (a mean over samples that all
            count alike), ``sum``, or a function of a batch that counts, named as a `factory`. Such a model is trained by data parallelism.
    """

    factory: str | None = None
    arguments: dict[str, Any] = {}
    huggingface: dict[str, Any] | str | None = None
    directory: str | None = None
    auto_class: str = "AutoModelForCausalLM"
    loss_count: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("factory", "huggingface", "directory") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of factory, huggingface, directory (given: {', '.join(given) or 'none'})"
            )
        if self.arguments and self.factory is None:
            raise ValueError("arguments go with factory")
        return self


class DataSection(Section):
    """What to train on: at most one of `text`, `jsonl`, `tokens`, `dataset`, `images`; ``text: stdlib`` if none is given.

    Args:
        text: ``stdlib`` (the sources of Python's standard library), or files and directories of the user's. Bytes, or tokens of
            `tokenizer`.
        jsonl: files of JSON lines; the text of a document is in its `field`.
        tokens: a row of token ids: a ``.npy``, or a ``.bin`` of `token_dtype`.
        dataset: ``path/to/file.py:function`` or ``package.module:function``, called with `arguments`. It returns a dataset
            (``__len__`` and ``__getitem__``) or a stream (``__iter__``), or a pair of one and a collator. If the dataset has an attribute
            ``lengths``, the tokens of each sample, a collator that pads to the longest sample pads to that of the global batch.
        images: a directory with a folder of images for each class, read in `image_size` pixels squared.
        tokenizer: a local Hugging Face directory; by default that of `model.directory`.
        sequence_length: tokens of a sample.
        packing: documents are joined and cut into samples without padding. False: one document a sample, cut or padded to
            `sequence_length`. By default true for text, and false for a dataset.
        balance: the samples of a global batch are put into an order in which every part has its share of the tokens; the dataset
            says how many each sample has in its attribute ``lengths``.
        shuffle_buffer: samples of a stream among which the next one is chosen; 0 for the order of the stream.
        validation: data of its own, of the same kind; the named function of a dataset is called with `arguments` too.
        validation_fraction: without it, the share of the data that is kept apart, never trained on. A stream has none.
        workers: processes of each rank that read its training samples ahead; a stream is read by one. 0: samples are read when they
            are needed.
        prefetch: global batches of which each of these processes has the rank's samples ready; 2 by default.
        cache: where token files are kept; None: beside the run.
    """

    text: str | tuple[str, ...] | None = None
    jsonl: str | tuple[str, ...] | None = None
    tokens: str | None = None
    dataset: str | None = None
    images: str | None = None
    arguments: dict[str, Any] | None = None
    field: str | None = None
    token_dtype: Literal["uint16", "uint32"] | None = None
    image_size: Positive | None = None
    tokenizer: str | None = None
    sequence_length: Positive = 128
    packing: bool | None = None
    balance: bool | None = None
    shuffle_buffer: Whole | None = None
    validation: str | tuple[str, ...] | None = None
    validation_fraction: Below1 = 0.05
    workers: Whole = 0
    prefetch: Positive | None = None
    cache: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_if_nothing_else(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and all(fields.get(kind) is None for kind in _KINDS):
            return {**fields, "text": "stdlib"}
        return fields

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give at most one of {', '.join(_KINDS)} (given: {', '.join(given)})")
        for name, kinds in _GOES_WITH.items():
            if getattr(self, name) not in (None, False) and given[0] not in kinds:
                raise ValueError(f"{name} goes with {' or '.join(kinds)}, not with {given[0]}")
        if self.workers and given[0] in ("text", "jsonl") and self.packing is not False:
            raise ValueError(
                "workers go with packing: false; packed text is memory-mapped, and there is nothing to read ahead"
            )
        if self.prefetch is not None and not self.workers:
            raise ValueError("prefetch is what workers have ready: set workers too")
        return self

    @property
    def kind(self) -> str:
        """The one that is given."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)


_KINDS = ("text", "jsonl", "tokens", "dataset", "images")
_GOES_WITH = {
    "arguments": ("dataset",),
    "balance": ("dataset",),
    "field": ("jsonl",),
    "image_size": ("images",),
    "packing": ("text", "jsonl", "dataset"),
    "shuffle_buffer": ("dataset",),
    "token_dtype": ("tokens",),
    "tokenizer": ("text", "jsonl"),
    "workers": ("dataset", "images", "text", "jsonl"),
}


class TrainingSection(Section):
    """How long and how exactly. ``clip_grad_norm`` 0 means no clipping; ``validate_every`` 0 only at the end.

    ``compile``: stages and whole models run as code that torch.compile makes, but for those with dropout, with BatchNorm over several
    devices, in parts on several devices, or with backwards in halves.

    ``deterministic``: accelerators take kernels that give the same bits in each run, which may be slower. ``tf32``: products of fp32
    matrices may be rounded to TF32 where a device has units for it; devices that have none then compute others.

    ``max_skipped_steps``: a step whose loss or gradient is not finite is skipped; more than so many in a row end the run.

    ``on_out_of_memory``: what happens when the memory of a device ends in mid run. ``replan``: the step is applied nowhere, and the run
    goes on from there under a plan that asks no more of that device than it was seen to have; ``stop``: it ends with what it lacked.

    ``sync``: sites that meet seldom, see `heterodyne.sync_section.SyncSection`; None: all devices do each step together.
    """

    steps: Positive = 100
    global_batch_size: Positive = 32
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"
    clip_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    validate_every: Whole = 0
    validation_samples: Positive = 64
    max_skipped_steps: Whole = 5
    on_out_of_memory: Literal["replan", "stop"] = "replan"
    compile: bool = False
    deterministic: bool = True
    tf32: bool = False
    sync: SyncSection | None = None

    @field_validator("sync")
    @classmethod
    def _shares_of_a_batch(cls, value: SyncSection | None, info: ValidationInfo) -> SyncSection | None:
        size = info.data.get("global_batch_size")
        if value is not None and size is not None and sum(value.shares.values()) != size:
            raise ValueError(
                f"the shares of the sites add up to {sum(value.shares.values())} samples, and training.global_batch_size is {size}: they "
                "are parts of it"
            )
        return value


class OptimizerSection(Section):
    """AdamW, AdamW with its state in 8 bits, SGD or Adafactor with linear warm-up and cosine decay to ``min_lr_ratio`` of ``lr``.

    Adafactor keeps a row and a column for each matrix in place of two values an element, and must see matrices whole, so plans that split
    them are left out. It has no ``betas``, ``eps`` and ``momentum``.

    ``adamw8bit`` is torchao's: a value of its state is a byte, with a scale for each 256 of a weight, of weights of 4,096 elements or more.
    It must see weights whole, too, and needs torchao.

    ``weight_decay`` is of the matrices; of normalisations, biases and other parameters with fewer than two dims only with
    ``decay_norms_and_biases``.

    ``schedule_steps``: the length of the cosine; later steps stay at its end. None: ``training.steps`` when the run begins; it is
    recorded in the run, and stays what it was when the run is extended.
    """

    name: OptimizerName = "adamw"
    lr: Annotated[float, Field(gt=0)] = 3e-4
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    momentum: Fraction = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    decay_norms_and_biases: bool = False
    warmup_steps: Whole = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    min_lr_ratio: Fraction = 0.1
    schedule_steps: Positive | None = None

    @property
    def reach(self) -> Reach:
        """Return what the update of an element depends on."""
        return "weight" if self.name in ("adafactor", "adamw8bit") else "element"


class ParallelismSection(Section):
    """Hints for the planner; the defaults let it choose.

    Args:
        strategy: ``auto`` takes the fastest predicted plan; ``data`` the fastest in which each device runs the whole model;
            ``pipeline`` the fastest in which the model is cut into stages; ``split`` the fastest in which layers are sharded over
            several devices; ``context`` in which their sequences do; ``equal`` gives each device the same share;
            ``fastest`` uses one device.
        micro_batch_sizes: the sizes that are measured and tried; ``auto``: 1, 2, 4, and so on, while larger ones are faster on any device.
        measure_s: about the seconds that measuring may take, a third of it to plan for a single device; with fewer, large sizes are
            extrapolated from small ones. ``auto``: a quarter of the training, from 10 to 60 s.
        bucket_size: gradients are reduced in buckets of about this size; ``auto``: the size at which the measured latency and bandwidth
            of an all-reduce cost least.
        rehearsal_s: about the seconds in which the plans that are predicted to be nearly the fastest are run, to see which is;
            0 to believe the prediction; ``auto``: a twentieth of the training, 30 s at most.
        check_s: the seconds that may be spent on comparing the captured graph and the parts of a batch with the model itself, once
            a model and before anything is measured; 0 to leave it out.
        asynchronous: written ``async``. ``predicted``: pipelines are not flushed between steps, and forwards that run before the update of
            the step before read weights that are predicted by the optimizer's moments and the gradients that are there: **inexact**, and
            never chosen otherwise.
    """

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    strategy: Strategy = "auto"
    micro_batch_sizes: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=64)] | Literal["auto"] = "auto"
    measure_s: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    bucket_size: Bytes | Literal["auto"] = "auto"
    rehearsal_s: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    check_s: Annotated[float, Field(ge=0)] = 10.0
    asynchronous: Annotated[Literal["predicted"] | None, Field(alias="async")] = None

    @model_validator(mode="after")
    def _of_pipelines(self) -> Self:
        if self.asynchronous is not None and self.strategy not in ("auto", "pipeline"):
            raise ValueError(f"async goes with strategy pipeline, not with {self.strategy}: it is about pipelines")
        return self


class CheckpointSection(Section):
    """``every`` 0: only at the end. ``keep``: how many of the newest stay on disk. ``max_failed``: a checkpoint that cannot be written, for
    lack of room say, costs a line; more than so many in a row end the run, and so does the last one.
    """

    every: Whole = 0
    keep: Positive = 2
    max_failed: Whole = 3


class MetricsSection(Section):
    """A line of metrics every so many steps, in ``metrics.jsonl`` and in trackers.

    Args:
        tensorboard: TensorBoard events, if it is installed.
        trackers: others, each a name or a mapping from the name to its options: ``[{wandb: {project: mine, mode: offline}}]``.
        flush_s: the seconds that trackers may take to finish after the last step.
    """

    every: Positive = 1
    tensorboard: bool = True
    trackers: TrackerList = ()
    flush_s: Annotated[float, Field(ge=0)] = 30.0

    @property
    def wanted(self) -> tuple[TrackerOptions, ...]:
        """All trackers, TensorBoard first."""
        board = self.tensorboard and all(each.name != "tensorboard" for each in self.trackers)
        return (*tracker_options(["tensorboard"] if board else []), *self.trackers)


class Job(Section):
    """What to train. See the module.

    Args:
        relative_to: the directory in which relative paths start; None: that of the job file. A run keeps it with its job.
    """

    model: ModelSection
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    optimizer: OptimizerSection = OptimizerSection()
    parallelism: ParallelismSection = ParallelismSection()
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()
    relative_to: str | None = None

    @field_validator("parallelism")
    @classmethod
    def _predictable(cls, value: ParallelismSection, info: ValidationInfo) -> ParallelismSection:
        training, optimizer = info.data.get("training"), info.data.get("optimizer")
        if value.asynchronous is None or training is None or optimizer is None:
            return value
        wrong = []
        if training.clip_grad_norm:
            wrong.append("training.clip_grad_norm: 0, for when one device updates no other has its gradients yet")
        if training.precision == "fp16":
            wrong.append("training.precision bf16 or fp32, for a loss scale takes one decision of all devices")
        if training.sync is not None:
            wrong.append("no training.sync: sites take the weights after each step")
        if optimizer.name not in ("adamw", "sgd") or (optimizer.name == "sgd" and not optimizer.momentum):
            wrong.append(
                "optimizer.name adamw, or sgd with momentum: it predicts weights by moments, which "
                f"{'sgd without momentum' if optimizer.name == 'sgd' else optimizer.name} lacks"
            )
        if wrong:
            raise ValueError("async: predicted goes with " + "; with ".join(wrong))
        return value

    @classmethod
    @checked_arguments
    def load(cls, path: Path | str, overrides: tuple[str, ...] = ()) -> Job:
        """Read a job file and apply ``section.field=value`` overrides (values are YAML). Raises JobError with the line."""
        content, lines = read_yaml(path, JobError)
        if not isinstance(content, dict):
            raise JobError("a job is a mapping with the sections " + ", ".join(cls.sections()), path=str(path), line=1)
        given: dict[tuple[str | int, ...], str] = {
            _override(content, override): f"--set {override}" for override in overrides
        }
        return validate(cls, content, error=JobError, path=str(path), lines=lines, overrides=given)

    @classmethod
    def sections(cls) -> tuple[str, ...]:
        """Their names, in the order of a file."""
        return tuple(name for name in cls.model_fields if name != "relative_to")

    def base(self, file: Path) -> Path:
        """The directory in which relative paths of this job start, which was read from ``file``."""
        return file.parent if self.relative_to is None else file.parent / self.relative_to

    @property
    def schedule_steps(self) -> int:
        """The length of the schedule of the learning rate."""
        return self.optimizer.schedule_steps or self.training.steps

    @property
    def decisive(self) -> dict[str, Any]:
        """Return what decides the losses, as plain JSON values: not how long it goes on, where files are kept, nor how it is spread,
        validated or reported.
        """
        return decisive(self.model_dump(mode="json"))

    @property
    def here(self) -> Job:
        """This job as its site does it: with its share of the samples and of the steps; itself where no site is named."""
        sync = self.training.sync
        if sync is None or sync.site is None:
            return self
        own = {
            "global_batch_size": sync.shares[sync.site],
            "steps": sync.steps_of(sync.site, self.training.steps),
        }
        return self.model_copy(update={"training": self.training.model_copy(update=own)})

    def continuing(self, recorded: Mapping[str, Any]) -> Job:
        """This job, to go on with a run that recorded those fields: its schedule keeps the length that it had, unless this job
        gives another one.
        """
        length = decisive(recorded).get("optimizer", {}).get("schedule_steps")
        if type(length) is not int or length < 1 or self.optimizer.schedule_steps is not None:
            return self
        return self.model_copy(update={"optimizer": self.optimizer.model_copy(update={"schedule_steps": length})})

    @property
    def fingerprint(self) -> str:
        """16 hex digits of what is `decisive`."""
        return hashlib.sha256(yaml.safe_dump(self.decisive, sort_keys=True).encode()).hexdigest()[:16]


def decisive(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return those fields of a job that decide the losses; fields that have no value are left out.

    The number of steps is none of them, but it is the length of a cosine schedule that has no ``schedule_steps``. Of fields that
    are decisive already nothing is changed, so what an older release has recorded can be compared with this.
    """
    kept = {
        section: {
            name: value
            for name, value in fields[section].items()
            if (section, name) not in _ANY_TIME and value is not None
        }
        for section in _DECISIVE
        if section in fields
    }
    optimizer, steps = kept.get("optimizer", {}), fields.get("training", {}).get("steps")
    if optimizer.get("schedule") != "cosine":
        optimizer.pop("schedule_steps", None)
    elif steps is not None:
        optimizer.setdefault("schedule_steps", steps)
    if sync := kept.get("training", {}).get("sync"):
        kept["training"]["sync"] = {name: value for name, value in sync.items() if name not in OF_ANY_RUN}
    return dict(without_secrets(kept))


_DECISIVE = ("model", "data", "training", "optimizer")
_ANY_TIME = frozenset({
    ("data", "cache"), ("data", "prefetch"), ("data", "validation"), ("data", "workers"), ("model", "loss_count"),
    ("training", "steps"), ("training", "validate_every"), ("training", "validation_samples"),
    ("training", "max_skipped_steps"), ("training", "on_out_of_memory"),
    ("training", "compile"), ("training", "deterministic"),
})  # fmt: skip


def _override(content: dict[str, Any], override: str) -> tuple[str, ...]:
    """Put the value into its place; the place."""
    key, equals, text = override.partition("=")
    section, *path = key.split(".")
    if not equals or not path:
        raise JobError(f"--set {override}: write section.field=value, for example --set training.steps=50")
    if not text.strip():
        raise JobError(
            f"--set {override}: there is no value; write {key}=null to set none, or {key}=\"''\" for an empty text"
        )
    try:
        value, _ = parse_yaml(text)
    except YamlFaultError as error:
        raise JobError(f"--set {override[:200]}: {text[:200]!r} is not a YAML value: {error}") from error
    place: Any = content
    for part in (section, *path[:-1]):
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, dict):
            raise JobError(f"--set {override}: {part!r} is not a section")
    place[path[-1]] = value
    return (section, *path)
