"""Write the pages of the reference that follow from the code: every field of a job, every error. `--check` compares only."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from heterodyne import errors, job, sync_section, tracker_options
from heterodyne.cluster.catalog import catalog
from heterodyne.plan import capabilities

_METHODS = {
    "Distributed": None,
    "DistributedDataParallel": ("count", "all_gather", "mean"),
}  # that are shown; None: all
FOLDER = Path(__file__).resolve().parent / "reference"


def pages(*, with_torch: bool = False) -> dict[str, str]:
    """The generated pages by file name; that of the API needs torch."""
    found = {
        "job.md": job_page(),
        "errors.md": errors_page(),
        "capabilities.md": capabilities_page(),
        "kinds.md": kinds_page(),
    }
    return found | {"api.md": api_page()} if with_torch else found


def capabilities_page() -> str:
    """What a plan may use, for which models: the table that the rules of plans and the search read."""
    return (
        "# What runs\n\nA plan may use what has a *yes*; it then trains exactly as one device does. The search proposes nothing else, "
        "and a plan file with anything else is refused with the reason.\n\n" + capabilities.table()
    )


def kinds_page() -> str:
    """Every kind of device that the catalog knows, with the numbers of its datasheet."""

    def number(value: float | None, unit: float) -> str:
        return "" if value is None else f"{value / unit:,.4g}"

    rows = [
        f"| {kind} | {', '.join(f'{name} {number(peak, 1e12)}' for name, peak in a.peak_flops.items())} | {number(a.memory_bytes, 1e9)} "
        f"| {number(a.memory_bandwidth_bytes_per_s, 1e9)} | {number(a.link_bandwidth_bytes_per_s, 1e9)} {a.link_type or ''} "
        f"| {number(a.tdp_w, 1)} |"
        for kind, a in catalog().items()
    ]
    head = [
        "kind",
        "dense peak (TFLOP/s)",
        "memory (GB)",
        "memory bandwidth (GB/s)",
        "link, one direction (GB/s)",
        "power (W)",
    ]
    return (
        "# Kinds of devices\n\nThe names that fleet files and `--add` take, for one device each (of a card with two devices, half of it). "
        "Numbers are those of datasheets, whose sources stand in the files of the catalog.\n\n"
        + "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *rows])
        + "\n"
    )


def api_page() -> str:
    """Every public name, with its signature and docstring, and the methods of the classes that people call."""
    import heterodyne as hd

    text = [
        "# API",
        "",
        "`import heterodyne as hd`. Names are loaded when they are first used, so that planning alone does not load torch.",
    ]
    for name in hd.__all__:
        value = getattr(hd, name)
        if name.startswith("_") or not callable(value):
            continue
        text += ["", f"## hd.{name}", "", *_described(name, value)]
        if name in _METHODS:
            for method, found in vars(value).items():
                function = found.fget if isinstance(found, property) else found
                if (
                    method.startswith("_")
                    or not inspect.isfunction(function)
                    or method not in (_METHODS[name] or (method,))
                ):
                    continue
                text += [
                    "",
                    f"### {method}",
                    "",
                    *_described(method, function, is_property=isinstance(found, property)),
                ]
    return "\n".join(text) + "\n"


def _described(name: str, value: object, *, is_property: bool = False) -> list[str]:
    docstring = inspect.getdoc(value) or ""
    if is_property or not (inspect.isfunction(value) or getattr(value, "__module__", "") == "heterodyne.api.options"):
        return ["```text", docstring, "```"]
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(value).parameters.values()]
    return ["```text", f"{name}{inspect.Signature(parameters)}", "", docstring, "```"]


def job_page() -> str:
    """Every section of a job, with type, default and meaning of each field."""
    text = [
        "# Jobs",
        "",
        "A job says what to train, on what, and how long. It is a YAML file. `--set section.field=value` overrides any field.",
        "Relative paths start in the directory of the file, or in the one that `relative_to`, beside the sections, names: a run keeps "
        "its job so.",
    ]
    for name in job.Job.sections():
        model = _model_of(job.Job.model_fields[name])
        summary, described = _docstring(model)
        text += ["", f"## {name}", "", summary, "", *_table(model, described)]
    summary, described = _docstring(sync_section.SyncSection)
    text += [
        "",
        "## training.sync",
        "",
        f"{summary} [More](../sites.md)",
        "",
        *_table(sync_section.SyncSection, described),
    ]
    text += ["", "## metrics.trackers", "", f"{_docstring(tracker_options.TrackerOptions)[0]} Each writes one run."]
    for name, option in tracker_options.TrackerOptions.model_fields.items():
        model = next(kind for kind in typing.get_args(option.annotation) if kind is not type(None))
        summary, described = _docstring(model)
        text += ["", f"### {name}", "", summary]
        text += ["", *_table(model, described)] if model.model_fields else []
    return "\n".join(text) + "\n"


def errors_page() -> str:
    """Every kind of error: when it is raised."""
    kinds = [value for name in errors.__all__ if (value := getattr(errors, name)) is not errors.HeterodyneError]
    text = [
        "# Errors",
        "",
        "Every error that Heterodyne raises on purpose is a `HeterodyneError` of `heterodyne.errors`. Its message says what is wrong, "
        "where, and what to do. The command line prints it without a traceback and exits with status 2 (79 after an `OutOfMemoryError`). "
        "A traceback is a bug of ours: please report it.",
        "",
        "| error | |",
        "|---|---|",
        *(f"| `{kind.__name__}` | {_first_paragraph(kind)} |" for kind in kinds),
    ]
    return "\n".join(text) + "\n"


def _table(model: type[BaseModel], described: dict[str, str]) -> list[str]:
    return [
        "| field | type | default | |",
        "|---|---|---|---|",
        *(
            f"| `{info.alias or f}` | {_type(info)} | {_default(info)} | {described.get(f, '')} |"
            for f, info in model.model_fields.items()
        ),
    ]


def _model_of(section: FieldInfo) -> type[BaseModel]:
    found = section.annotation
    assert isinstance(found, type)
    assert issubclass(found, BaseModel)
    return found


def _docstring(model: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """What stands before ``Args:``, and of each field what stands there."""
    summary, _, arguments = inspect.cleandoc(model.__doc__ or "").partition("Args:")
    described: dict[str, str] = {}
    last = ""
    for line in inspect.cleandoc(arguments).splitlines() if arguments else []:
        name, colon, words = line.partition(": ")
        if colon and name in model.model_fields:
            described[name] = words.strip()
            last = name
        elif last:
            described[last] += " " + line.strip()
    return " ".join(summary.replace("``", "`").split()), {
        n: w.replace("``", "`").replace("|", "\\|") for n, w in described.items()
    }


def _type(info: FieldInfo) -> str:
    if typing.get_origin(info.annotation) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(info.annotation))
    return f"`{_name(info.annotation)}`".replace("|", r"\|")


def _name(kind: Any) -> str:
    """A type as people write it, without the bounds that pydantic keeps in it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _name(inner[0])
    if origin is typing.Literal:
        return " | ".join(map(repr, inner))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_name, inner))
    if inner:
        return f"{origin.__name__}[{', '.join(map(_name, inner))}]"
    return {type(None): "None", ...: "..."}.get(kind) or getattr(kind, "__name__", str(kind))


def _default(info: FieldInfo) -> str:
    return (
        "required" if info.is_required() else f"`{info.get_default(call_default_factory=True)!r}`".replace("|", "\\|")
    )


def _first_paragraph(kind: type) -> str:
    return " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split())


def main() -> int:
    stale = []
    for name, text in pages(with_torch=True).items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if "--check" in sys.argv and stale:
        sys.stderr.write(f"{', '.join(stale)} would change: run python docs/generate.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
