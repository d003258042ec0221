"""What the layers of a job's model cost on devices that are not here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from heterodyne.cluster.fleet import Fleet
from heterodyne.cluster.profile import Profile
from heterodyne.cost.graph_layers import GraphLayers
from heterodyne.cost.layers import LayerCosts
from heterodyne.cost.measured_times import MeasuredTimes
from heterodyne.cost.recipe import Recipe
from heterodyne.errors import CaptureError, ClusterError, HeterodyneError, JobError, NoGraphError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Job, ModelSection
from heterodyne.json_files import read_json
from heterodyne.plan.precision import Precisions, of_kind
from heterodyne.predictor.datasheet_times import graph_layers
from heterodyne.predictor.from_config import says_shape, transformer_of
from heterodyne.predictor.layer_costs import predicted_layers
from heterodyne.predictor.scaled_times import scaled_times
from heterodyne.predictor.software import Software, framework_names, is_known, software_of

__all__ = ["captured", "costs_of_job", "paper_precisions", "paper_software", "shape_of", "with_datasheets"]


def costs_of_job(
    job: Job, base: Path, *, profile: Profile | None = None, framework: str | None = None
) -> Callable[[Fleet], LayerCosts]:
    """For any fleet: as measured, where there is a profile, and other kinds by what that teaches of their datasheets; from a shape, where
    the job gives one; else from the graph of the model, which is captured without its weights.

    Args:
        framework: who will run the plan, as far as it changes seconds and bytes; None: this library on PyTorch.
    """
    if framework is not None and not is_known(framework):
        raise HeterodyneError(
            f"--framework {framework}: nothing is known of it; known are {', '.join(framework_names())}"
        )
    software = paper_software(job, framework)
    shape = shape_of(job.model, base)
    # What auto is depends on the kind; kinds without units for bf16 are predicted with what is nearest.
    precision = "bf16" if job.training.precision == "auto" else job.training.precision
    recipe = Recipe(
        optimizer=job.optimizer.name,
        momentum=job.optimizer.momentum,
        precision=precision,
    )
    if profile is not None:
        if job.training.precision != "auto":
            profile.require(dict.fromkeys(profile.devices, precision))
        measured = MeasuredTimes(graph=captured(job, base), profile=profile, recipe=recipe)
        known = measured.kinds
        return lambda fleet: GraphLayers(scaled_times(measured, with_datasheets(fleet, known=known), software))
    if shape is not None:
        model = transformer_of(shape, seq=job.data.sequence_length)
        return lambda fleet: predicted_layers(model, with_datasheets(fleet), precision=precision, software=software)
    graph = captured(job, base)
    return lambda fleet: graph_layers(graph, with_datasheets(fleet), recipe=recipe, software=software)


def paper_software(job: Job, framework: str | None = None) -> Software:
    """Return the software of a framework that will run the plan; None: this library on PyTorch."""
    # fp16 is trained in where it is asked for, not in the place of bf16.
    instead = job.training.precision == "auto"
    return software_of(framework) if framework is not None else replace(software_of(None), fp16=instead)


def with_datasheets(fleet: Fleet, *, known: Collection[str] = ()) -> Fleet:
    """Raises ClusterError for processors, which have none, unless they are ``known``."""
    bare = [pool.name for pool in fleet.pools if pool.kind == "cpu" and pool.kind not in known]
    if bare:
        raise ClusterError(
            f"no datasheet says what the CPUs of {', '.join(bare)} do: measure one with 'heterodyne measure' and give --profile, or "
            "start the job on them with torchrun"
        )
    return fleet


def paper_precisions(job: Job, fleet: Fleet) -> Precisions:
    """Return the precision of each kind, as far as datasheets state it."""
    if job.training.precision != "auto":
        return job.training.precision
    backends = {pool.kind: pool.backend for pool in fleet.pools}
    found = {
        kind: of_kind(backend, bf16_units=backend != "cpu" and "bf16" in fleet.accelerator(kind).peak_flops)
        for kind, backend in backends.items()
    }
    return found if len(set(found.values())) > 1 else next(iter(found.values()))


def shape_of(section: ModelSection, base: Path) -> Mapping[str, Any] | None:
    """The configuration of a language model; None for a model that has none, or one that does not say its shape."""
    given = section.huggingface
    if isinstance(given, str) or section.directory is not None:
        path = base / given if isinstance(given, str) else base / (section.directory or "") / "config.json"
        try:
            given = read_json(path)
        except (OSError, ValueError) as error:
            raise JobError(f"{path} cannot be read as a configuration: {error}") from error
    if not isinstance(given, Mapping) or section.auto_class != "AutoModelForCausalLM":
        return None
    return given if says_shape(given) else None


def captured(job: Job, base: Path) -> ModelGraph:
    """The graph of the job's model, without weights. Raises JobError or CaptureError."""
    from heterodyne.api.job_model import example_on_paper
    from heterodyne.frontend import capture
    from heterodyne.models import build

    model = build(job.model, base=base, device="meta")
    example = example_on_paper(job, base)
    try:
        return capture(model, example)
    except NoGraphError as error:
        raise CaptureError(
            f"{error}\nOn paper the seconds of a model come from the ops of its graph. Plan on devices that are here, where the module is "
            "measured as it is, or change this line"
        ) from error
    except HeterodyneError:
        raise
    except TypeError as error:
        raise JobError(f"the model of the job does not take {' and '.join(map(repr, example))}: {error}") from error
