"""What a job or a loop can ask of trackers of experiments: which, and with what options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from heterodyne.documents import Section, validate
from heterodyne.errors import JobError

__all__ = ["TrackerList", "TrackerOptions", "tracker_options"]


class TensorBoardOptions(Section):
    """No options: event files go to ``tensorboard/`` of the run directory."""


class WandbOptions(Section):
    """As in ``wandb.init``; files go to ``wandb/`` of the run directory. ``name`` is that of the run directory by default."""

    project: str | None = None
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] | None = None
    notes: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None


class MLflowOptions(Section):
    """``tracking_uri`` None: as the environment or MLflow itself says. ``run_name`` is that of the run directory by default."""

    tracking_uri: str | None = None
    experiment: str | None = None
    run_name: str | None = None
    tags: dict[str, str] | None = None


class TrackioOptions(Section):
    """As in ``trackio.init``. ``name`` is that of the run directory and the time by default."""

    project: str
    name: str | None = None
    space_id: str | None = None


class CustomOptions(Section):
    """One's own: ``factory`` is ``package.module:function`` or ``/absolute/path.py:function``.

    It is called in a process of its own with an ``Opening`` (directory, run, done, config, options: the ``arguments``) and returns
    what has ``place``, ``write(records)`` and ``close()``; see ``runtime/records/trackers/tracker.py``.
    """

    factory: str = Field(pattern=r"^.+:[A-Za-z_]\w*$")
    arguments: dict[str, Any] = {}


class TrackerOptions(Section):
    """One tracker: a name, or a mapping from the name to its options."""

    tensorboard: TensorBoardOptions | None = None
    wandb: WandbOptions | None = None
    mlflow: MLflowOptions | None = None
    trackio: TrackioOptions | None = None
    custom: CustomOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, given: object) -> object:
        if isinstance(given, str):
            return {given: {}}
        if isinstance(given, Mapping):  # 'wandb:' without options
            return {name: {} if options is None and len(given) == 1 else options for name, options in given.items()}
        return given

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"is one tracker ({', '.join(type(self).model_fields)}); given: {', '.join(given) or 'none'}"
            )
        return self

    @property
    def name(self) -> str:
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def options(self) -> dict[str, Any]:
        """Those that were given."""
        dumped: dict[str, Any] = getattr(self, self.name).model_dump(mode="json", exclude_none=True)
        return dumped

    @property
    def package(self) -> str | None:
        """Return what must be installed; None: nothing that is known."""
        return None if self.name == "custom" else self.name


def _all_different(trackers: tuple[TrackerOptions, ...]) -> tuple[TrackerOptions, ...]:
    names = [each.name for each in trackers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice; each writes one run")
    return trackers


TrackerList = Annotated[tuple[TrackerOptions, ...], AfterValidator(_all_different)]


class _Wanted(Section):
    trackers: TrackerList


def tracker_options(wanted: Sequence[str | Mapping[str, Any] | TrackerOptions]) -> tuple[TrackerOptions, ...]:
    """Raises JobError for a tracker or an option that does not exist, and for one that is there twice."""
    return validate(_Wanted, {"trackers": list(wanted)}, error=JobError).trackers
