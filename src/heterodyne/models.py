"""From the ``model`` section of a job to an nn.Module.

Three sources: a function of the user's, a Hugging Face configuration (random weights), a local Hugging Face directory (its
weights). Hugging Face models are built in float32, whatever their configuration was saved in; a lower precision in training is
the job's to choose.
The contract of a model: ``model(**batch)`` returns its loss, or an object or mapping that holds it as ``loss``, or a
tuple that starts with it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from heterodyne.errors import JobError
from heterodyne.factories import call_factory, named_function
from heterodyne.job import ModelSection
from heterodyne.json_files import read_json
from heterodyne.stored_weights import StoredWeights, parameters_on_meta
from heterodyne.text_files import require_regular_in

__all__ = ["build", "build_count", "build_stored"]

_MOST_LAYERS = 10_000


def build(section: ModelSection, *, base: Path, device: Literal["cpu", "meta"] = "cpu", seed: int = 0) -> nn.Module:
    """The model of a job, in training mode.

    Args:
        section: which model.
        base: the directory of the job file; relative paths start there.
        device: ``meta`` allocates no weights, of whatever source.
        seed: decides the initial weights, the same on every machine; the caller's random state is left as it was.

    Raises JobError for a source that is not there or does not give a module.
    """
    with _random_state(seed), torch.device(device):
        if section.factory is not None:
            model = _from_factory(section.factory, section.arguments, base)
        elif section.huggingface is not None:
            model = _from_configuration(section.huggingface, section.auto_class, base)
        else:
            assert section.directory is not None, "ModelSection has exactly one source"
            model = _from_directory(base / section.directory, section.auto_class, device)
    if device == "meta" and any(p.device.type != "meta" for p in model.parameters()):
        _to_meta(model)  # a factory that names its devices, or that converts arrays, allocates all the same
    return model.train()


def build_stored(section: ModelSection, *, base: Path) -> tuple[nn.Module, StoredWeights] | None:
    """The model of a directory with parameters on the meta device, and where they are read; None where the files have others, or the
    model comes from elsewhere. Raises JobError.
    """
    if section.directory is None:
        return None
    path = base / section.directory
    transformers = _transformers()
    configuration = _configuration(transformers, _read_configuration(path / "config.json"))
    _require_regular_in(path)
    if not sorted(path.glob("*.safetensors")):
        return None
    with _random_state(0), torch.device("cpu"), parameters_on_meta():
        model = _build(
            lambda: _auto_class(transformers, section.auto_class).from_config(configuration, dtype=torch.float32),
            section.auto_class,
        )
    weights = StoredWeights.of(path, model)
    return None if weights is None else (model.train(), weights)


def build_count(section: ModelSection, *, base: Path) -> Literal["samples", "sum"] | Callable[..., Any] | None:
    """Return what a job says that the loss of its model divides by. Raises JobError for a function that is not there."""
    given = section.loss_count
    if given is None or given == "samples" or given == "sum":
        return given  # type: ignore[return-value]  # the test narrows it
    return named_function(given, base=base, key="model.loss_count")


@contextlib.contextmanager
def _random_state(seed: int) -> Iterator[None]:
    """Seed the CPU's generator, which initial weights are drawn from, and put its state back after."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _to_meta(model: nn.Module) -> None:
    """Replace parameters and buffers by ones without data; those that are tied stay tied, which Module.to does not promise."""
    empty: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = empty.setdefault(id(tensor), _empty_like(tensor))


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


# ---- a factory ----------------------------------------------------------------------------------------------------


def _from_factory(factory: str, arguments: Mapping[str, Any], base: Path) -> nn.Module:
    model = call_factory(factory, arguments, base=base, key="model.factory")
    if not isinstance(model, nn.Module):
        raise JobError(f"model.factory: {factory} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


# ---- Hugging Face -------------------------------------------------------------------------------------------------


def _from_configuration(source: Mapping[str, Any] | str, auto_class: str, base: Path) -> nn.Module:
    transformers = _transformers()
    fields = dict(source) if isinstance(source, Mapping) else _read_configuration(base / source)
    configuration = _configuration(transformers, fields)
    if isinstance(source, Mapping):
        _require_known(configuration, fields)
    return _build(
        lambda: _auto_class(transformers, auto_class).from_config(configuration, dtype=torch.float32), auto_class
    )


def _from_directory(path: Path, auto_class: str, device: str) -> nn.Module:
    transformers = _transformers()
    fields = _read_configuration(path / "config.json")
    _require_regular_in(path)
    if not sorted(path.glob("*.safetensors")):
        raise JobError(
            f"model.directory: {path} has no *.safetensors; save the model with save_pretrained, or start from model.huggingface"
        )
    loader = _auto_class(transformers, auto_class)
    if device == "meta":
        return _build(lambda: loader.from_config(_configuration(transformers, fields), dtype=torch.float32), auto_class)
    with torch.device("cpu"), contextlib.redirect_stderr(io.StringIO()):  # every rank would draw a bar of its own
        return _build(
            lambda: loader.from_pretrained(
                path, local_files_only=True, use_safetensors=True, dtype=torch.float32, use_cache=False
            ),
            auto_class,
        )


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise JobError(
            "model.huggingface and model.directory need Transformers; install it with pip install 'heterodyne[huggingface]'"
        ) from error


def _read_configuration(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except OSError as error:
        raise JobError(
            f"model: {path} cannot be read: {error.strerror}. It is a path, relative to the job file; nothing is fetched from the "
            "Hugging Face hub. Download the model first (hf download NAME --local-dir DIR) and write directory: DIR, or write "
            "huggingface: {model_type: ...}"
        ) from error
    except ValueError as error:
        raise JobError(f"model: {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise JobError(f"model: {path} is not a configuration: it holds a {type(content).__name__}, not an object")
    return content


def _configuration(transformers: Any, fields: Mapping[str, Any]) -> Any:
    remaining = dict(fields)
    model_type = remaining.pop("model_type", None)
    if not isinstance(model_type, str):
        raise JobError("model.huggingface has no model_type; write for example model_type: llama")
    try:
        configuration = transformers.AutoConfig.for_model(model_type, **remaining)
    except ValueError as error:
        if "Unrecognized model identifier" not in str(error):
            raise JobError(f"model.huggingface: {model_type}: {error}") from error
        raise JobError(
            f"model.huggingface: Transformers {transformers.__version__} knows no model_type {model_type!r}"
        ) from error
    except Exception as error:  # its classes raise anything for fields that they do not expect
        raise JobError(f"model.huggingface: {model_type}: {type(error).__name__}: {error}") from error
    layers = getattr(configuration, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise JobError(
            f"model.huggingface: {model_type}: {layers:,} layers are more than {_MOST_LAYERS:,}, which takes hours to build"
        )
    # The cache of keys and values is for generating text; in training it costs memory and gives nothing.
    configuration.use_cache = False
    return configuration


def _require_known(configuration: Any, fields: Mapping[str, Any]) -> None:
    """Raise JobError for a field that the configuration has only because it was given: Transformers keeps any."""
    usual = type(configuration)()
    unknown = [name for name in fields if name in vars(configuration) and not hasattr(usual, name)]
    if unknown:
        close = get_close_matches(unknown[0], [*vars(usual), *usual.attribute_map], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise JobError(f"model.huggingface: {type(usual).__name__} has no field {unknown[0]!r}{hint}")


def _require_regular_in(path: Path) -> None:
    try:
        require_regular_in(path)
    except OSError as error:
        raise JobError(f"model.directory: {error.filename or path} cannot be read: {error.strerror}") from error


def _auto_class(transformers: Any, name: str) -> Any:
    found = getattr(transformers, name, None)
    if found is None or not hasattr(found, "from_config"):
        raise JobError(f"model.auto_class: Transformers has no {name!r}; write for example AutoModelForCausalLM")
    return found


def _build(make: Callable[[], Any], auto_class: str) -> nn.Module:
    try:
        model = make()
    except Exception as error:  # its classes raise anything for files and fields that they do not expect
        reason = (
            str(error).partition("\n")[0] or type(error).__name__
        )  # the rest lists every configuration that the class knows
        raise JobError(f"model: {auto_class} cannot build it: {reason}") from error
    assert isinstance(model, nn.Module)
    return model
