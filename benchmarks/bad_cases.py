"""Bad inputs of the command line, drawn from a seed: what people mistype, what disks and strangers leave behind.

Each kind of case takes a good command, and spoils one thing of it: a file, a field, an option, a variable of the environment.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
import yaml
from bad_place import CLUSTER, FLEET, JOB, SCHEDULE, STEPS

from heterodyne.cli import app
from heterodyne.job import Job
from pure.spoiled import VALUES, as_json, as_text, as_yaml, with_other_value
from pure.spoiled import places as places_of

__all__ = ["KINDS", "Case", "cases"]

ON_ONE = ("--cluster", "one.yaml")
FROM_FILE = ("--job", "job.yaml", "--cluster", "one.yaml", "--profile", "profile.json")
ON_PAPER = ("plan", "job.yaml", "--on-paper", "--cluster", "fleet.yaml", "--within", "2")
RESUME = ("train", "job.yaml", *ON_ONE, "--run-dir", "run", "--resume", "--set", f"training.steps={STEPS}")
GOOD = {
    "devices": ("devices", *ON_ONE),
    "measure": ("measure", "job.yaml", *ON_ONE),
    "plan": ("plan", "job.yaml", *ON_ONE),
    "simulate": ("simulate", "plan.json", *FROM_FILE),
    "train": ("train", "job.yaml", *ON_ONE),
    "verify": ("verify", "job.yaml", *ON_ONE, "--batches", "1"),
    "report": ("report", "run"),
    "emulate": ("emulate", "--speeds", "0.5", "--", "true"),
}
PATHS = (
    "nowhere",
    "empty",
    ".",
    "",
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "text.txt/below",
    "x" * 300,
    "model.py",
    "run",
)
"""What may be given for a file or a directory."""
VERBS = ("train", "plan", "measure", "verify")
ODD = ("fifo", "socket", "device", "directory", "huge", "nothing", "letters", "loop")
"""What may stand in the place of a file: ``huge`` is a hole of a TiB, ``letters`` are no UTF-8, ``loop`` a link to itself."""
NO_NUMBERS = (
    "+", "-", "_", ".", "+_", "e5", "0x", "1e400", "-1e400", ".nan", ".inf", "-.inf", "9" * 400, "-" + "9" * 400, "1e", "--1", "1,5",
    "!!int ''", "!!int '+'", "!!float '-'", "!!int '_'", "1:30", "010", "[1]", "{}", "yes", "1 2", "\N{ARABIC-INDIC DIGIT ONE}e9",
)  # fmt: skip
FILES = ("FILE", "PLAN", "DIR", "RUN", "JOB.yaml", "STEP_DIR", "NAME|FILE.csv")
VARIABLES = {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
SLURM = {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_PROCID": "0",
    "SLURM_JOB_ID": "77", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost",
}  # fmt: skip
OTHERS = (
    "XDG_CACHE_HOME",
    "HOME",
    "OMP_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "TMPDIR",
    "COLUMNS",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command in a copy of the place, with what is spoiled there.

    Args:
        files: what is written into the copy before; None for a file that is removed, a directory for a path that ends in ``/``.
        names: a message about it names one of these.
        equals_whole: where the command succeeds, the run has the weights of the run that nothing happened to.
        odd: what stands in the place of a file, one of `ODD`.
        refused: a success would be wrong.
    """

    kind: str
    arguments: tuple[str, ...]
    files: dict[str, bytes | None] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    equals_whole: bool = False
    odd: dict[str, str] = field(default_factory=dict)
    refused: bool = False


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What a kind of case is drawn from."""

    kind: str
    chance: random.Random
    place: Path


def cases(count: int, seed: int, place: Path) -> Iterator[Case]:
    """So many, the kinds in turn."""
    chance = random.Random(seed)
    weighted = [kind for kind, (weight, _) in KINDS.items() for _ in range(weight)]
    for number in range(count):
        kind = weighted[number * 7 % len(weighted)]  # 7 and the sum of the weights have no divisor in common
        yield KINDS[kind][1](Draw(kind=kind, chance=chance, place=place))


def of_job(draw: Draw) -> Case:
    verb = draw.chance.choice(("train", "train", "plan", "measure", "verify"))
    command = ON_PAPER if verb == "plan" and draw.chance.random() < 0.5 else GOOD[verb]
    return Case(
        kind=draw.kind,
        arguments=command,
        files={"job.yaml": _bytes(as_yaml(JOB, draw.chance))},
        names=("job.yaml", *_fields()),
    )


def of_override(draw: Draw) -> Case:
    name = draw.chance.choice([*_fields(), "model.arguments.width", "model.arguments.vocabulary"])
    value = draw.chance.choice([value for value in VALUES if value != "/"])  # it would be written to
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    if draw.chance.random() < 0.15:
        name = as_text(name, draw.chance)
    command = GOOD[draw.chance.choice(("train", "train", "train", "measure", "plan"))]
    return Case(
        kind=draw.kind,
        arguments=(*command, "--set", _argument(f"{name}={text}")[:100_000]),
        names=("--set", text[:40], *_fields()),
    )


def of_cluster(draw: Draw) -> Case:
    command = GOOD[draw.chance.choice(("devices", "plan", "train", "simulate", "measure"))]
    return Case(
        kind=draw.kind,
        arguments=command,
        files={"one.yaml": _bytes(as_yaml(CLUSTER, draw.chance))},
        names=("one.yaml", "device"),
    )


def of_fleet(draw: Draw) -> Case:
    more = draw.chance.choice(
        ((), ("--frontier",), ("--families",), ("--objective", "money"), ("--json",), ("--add", "8xT4"))
    )
    return Case(
        kind=draw.kind,
        arguments=(*ON_PAPER, *more),
        files={"fleet.yaml": _bytes(as_yaml(FLEET, draw.chance))},
        names=("fleet.yaml",),
    )


def of_plan(draw: Draw) -> Case:
    command = draw.chance.choice(
        ((*GOOD["train"], "--plan", "plan.json"), (*GOOD["verify"], "--plan", "plan.json"), GOOD["simulate"])
    )
    return Case(
        kind=draw.kind,
        arguments=command,
        files={"plan.json": _json(draw.place / "plan.json", draw.chance)},
        names=("plan",),
    )


def of_profile(draw: Draw) -> Case:
    command = draw.chance.choice(((*GOOD["plan"], "--profile", "profile.json"), GOOD["simulate"]))
    return Case(
        kind=draw.kind,
        arguments=command,
        files={"profile.json": _json(draw.place / "profile.json", draw.chance)},
        names=("profile",),
    )


def of_run(draw: Draw) -> Case:
    """Any file of a run: report, simulate, resume or follow it."""
    files = [
        path.name for path in sorted((draw.place / "run").iterdir()) if path.suffix in (".json", ".jsonl", ".yaml")
    ]
    name = draw.chance.choice([name for name in files if name != "trace.json"])
    reports = (GOOD["report"], GOOD["report"], ("report", "whole", "--reference", "run"))
    command = draw.chance.choice((*reports, ("simulate", "run"), RESUME, (*GOOD["train"], "--plan", "run")))
    spoiled = {f"run/{name}": _any(draw.place / "run" / name, draw.chance)}
    return Case(
        kind=draw.kind,
        arguments=command,
        files=spoiled,
        names=("run", name, *_fields()),
        equals_whole=command is RESUME,
    )


def of_checkpoint(draw: Draw) -> Case:
    """Any file of any checkpoint; a run that goes on ends with the weights of one that was left alone."""
    path = draw.chance.choice(sorted(path for path in (draw.place / "run" / "checkpoint").rglob("*") if path.is_file()))
    where = str(path.relative_to(draw.place))
    files = {where: _any(path, draw.chance)}
    if draw.chance.random() < 0.2:
        other = where.replace("step-4", "step-2") if "step-4" in where else where.replace("step-2", "step-4")
        files = {where: (draw.place / other).read_bytes()}
    return Case(kind=draw.kind, arguments=RESUME, files=files, names=("checkpoint", "step-"), equals_whole=True)


def of_crafted_checkpoint(draw: Draw) -> Case:
    """A field of the state or of the manifest changed by somebody who knows how to make the digests right."""
    directory = draw.place / "run" / "checkpoint" / "step-4"
    manifest = json.loads((directory / "manifest.json").read_text())
    files = {}
    if draw.chance.random() < 0.3:
        manifest = with_other_value(manifest, draw.chance)
    else:
        state = _bytes(json.dumps(with_other_value(json.loads((directory / "state.json").read_text()), draw.chance)))
        files["state.json"] = state
        manifest["files"]["state.json"] = {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    manifest.pop("digest", None)
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["digest"] = hashlib.sha256(text.encode()).hexdigest()
    files["manifest.json"] = _bytes(json.dumps(manifest))
    spoiled = {f"run/checkpoint/step-4/{name}": content for name, content in files.items()}
    return Case(kind=draw.kind, arguments=RESUME, files=spoiled, names=("checkpoint", "step-"))


def of_exported(draw: Draw) -> Case:
    path = draw.chance.choice(sorted((draw.place / "hf" / "model").iterdir()))
    command = ("train", "from_hf.yaml", *ON_ONE)
    return Case(
        kind=draw.kind,
        arguments=command,
        files={str(path.relative_to(draw.place)): _any(path, draw.chance)},
        names=("hf/model", path.name, "model."),
    )


def of_data(draw: Draw) -> Case:
    name, sets = draw.chance.choice(
        (
            ("lines.jsonl", ("data.jsonl=lines.jsonl", "data.field=text")),
            ("tokens.npy", ("data.tokens=tokens.npy",)),
            ("text.txt", ("data.text=text.txt",)),
            ("model.py", ()),
        )
    )  # fmt: skip
    cleared = ("data.text=null",) if name != "text.txt" and sets else ()
    given = [part for one in (*cleared, *sets) for part in ("--set", one)]
    return Case(
        kind=draw.kind,
        arguments=(*GOOD["train"], *given),
        files={name: _any(draw.place / name, draw.chance)},
        names=(name, "data"),
    )


def of_schedule(draw: Draw) -> Case:
    command = (*GOOD["simulate"], "--schedule", "schedule.csv")
    return Case(
        kind=draw.kind,
        arguments=command,
        files={"schedule.csv": _bytes(as_text(SCHEDULE, draw.chance))},
        names=("schedule",),
    )


def of_option(draw: Draw) -> Case:
    """Any option or argument of any command, with any value."""
    verb = draw.chance.choice(sorted(GOOD))
    parameters = [each for each in _commands()[verb].params if each.name != "help"]
    parameter = draw.chance.choice(parameters)
    command = list(GOOD[verb])
    if verb == "train" and parameter.name == "resume":
        command += ["--run-dir", draw.chance.choice(PATHS)]
    if verb == "plan" and draw.chance.random() < 0.5:
        command = list(ON_PAPER)
    value = _value(parameter, draw.chance)
    if parameter.param_type_name == "argument":
        command[1 if verb != "emulate" else -1] = value
        return Case(
            kind=draw.kind,
            arguments=tuple(command),
            names=(parameter.metavar, value[:20] or "''", "Missing", "No such option"),
        )
    option = parameter.opts[0]
    given = (option,) if getattr(parameter, "is_flag", False) else (option, value)
    if option in command:
        place_of = command.index(option)
        del command[place_of : place_of + 2]
    split = 1 if verb == "emulate" else len(command)
    return Case(
        kind=draw.kind,
        arguments=(*command[:split], *given, *command[split:]),
        names=(option.strip("-"), value[:20] or "''"),
    )


def of_command_line(draw: Draw) -> Case:
    """Words left out, doubled, in another order, or torn."""
    command = list(GOOD[draw.chance.choice(sorted(GOOD))])
    spot = draw.chance.randrange(len(command))
    match draw.chance.randrange(4):
        case 0:
            del command[spot]
        case 1:
            command.insert(spot, command[spot])
        case 2:
            command[spot] = _argument(as_text(command[spot], draw.chance))
        case _:
            command.insert(spot, draw.chance.choice(("--fast", "-x", "--", "-", "--set", "--cluster=", "--resume=yes")))
    return Case(kind=draw.kind, arguments=tuple(command), names=("",))


def of_environment(draw: Draw) -> Case:
    given = dict(draw.chance.choice((VARIABLES, SLURM, dict.fromkeys(OTHERS, ""))))
    for name in draw.chance.sample(sorted(given), 2):
        if draw.chance.random() < 0.2:
            del given[name]
        else:
            value = (
                str(draw.chance.choice(VALUES))[:2000]
                if draw.chance.random() < 0.7
                else as_text(given[name], draw.chance)
            )
            given[name] = _argument("/proc/none" if value == "/" else value)
    if "HOME" in given:
        given = {name: value for name, value in given.items() if value}
    return Case(
        kind=draw.kind,
        arguments=GOOD[draw.chance.choice(("train", "train", "devices", "plan", "simulate"))],
        variables=given,
        names=(*VARIABLES, *SLURM, *given, *filter(None, given.values())),
    )


def of_odd_file(draw: Draw) -> Case:
    """Something in the place of a file that is none: whoever opens a pipe waits for ever, and a device has no end."""
    command, name = draw.chance.choice(_read_files(draw.place))
    kind = draw.chance.choice(ODD)
    return Case(
        kind=draw.kind,
        arguments=command,
        odd={name: kind},
        names=(name, Path(name).name, Path(name).parent.name, "data", "model", "checkpoint", "run"),
        equals_whole=command is RESUME,
        # A report shows what can be read, a run goes on from an earlier checkpoint, and any bytes are a text.
        refused=name.partition("/")[0] not in ("run", "hf")
        and kind != "huge"
        and (name, kind) != ("text.txt", "letters"),
    )


def of_number(draw: Draw) -> Case:
    """A number that is none, or none that can be, in any field or option that takes one."""
    text = draw.chance.choice(NO_NUMBERS)
    if draw.chance.random() < 0.25:
        text = draw.chance.choice((text, "nan", "inf", "-inf", "-nan"))
        command = draw.chance.choice(
            (
                (*ON_PAPER[:-1], text), (*ON_PAPER, "--budget", text), (*GOOD["verify"][:-1], text),
                ("emulate", "--speeds", text, "--", "true"), ("emulate", "--speeds", "0.5", "--memory", text, "--", "true"),
                ("emulate", "--speeds", "0.5", "--links", text, "--", "true"),
            )
        )  # fmt: skip
        return Case(
            kind=draw.kind, arguments=command, names=("within", "budget", "batches", "speed", text[:20]), refused=True
        )
    name = draw.chance.choice(_numeric_fields())
    return Case(
        kind=draw.kind,
        arguments=(*GOOD["train"], "--set", f"{name}={text}"),
        names=("--set", name),
        refused=True,
    )


def of_count(draw: Draw) -> Case:
    """A number of things that nobody has, in any file that counts some."""
    name, command = draw.chance.choice(
        (
            ("plan.json", (*GOOD["train"], "--plan", "plan.json")), ("plan.json", GOOD["simulate"]), ("profile.json", GOOD["simulate"]),
            ("one.yaml", GOOD["devices"]), ("one.yaml", GOOD["plan"]), ("fleet.yaml", ON_PAPER), ("hf.yaml", ("train", "hf.yaml", *ON_ONE)),
            ("job.yaml", GOOD["train"]),
        )
    )  # fmt: skip
    content = yaml.safe_load((draw.place / name).read_text())
    if name == "plan.json":
        content["pipelines"][0]["replicas"] = 1
    if name == "one.yaml":
        content["nodes"][0]["devices"][0]["count"] = 1
    places = [
        at
        for at in places_of(content)
        if isinstance(value_at(content, at), int) and not isinstance(value_at(content, at), bool)
    ]
    at = draw.chance.choice(places)
    value_at(content, at[:-1])[at[-1]] = draw.chance.choice((2**31 - 1, 10**9, 10**6, 2**63, -1))
    text = json.dumps(content) if name.endswith(".json") else yaml.safe_dump(content)
    return Case(
        kind=draw.kind,
        arguments=command,
        files={name: _bytes(text)},
        names=(name, "plan", "profile", "model", "data", *_fields()),
    )


def of_letters(draw: Draw) -> Case:
    """Letters that a terminal obeys, in the texts of any file of somebody else's; none of them may come through."""
    run = [f"run/{each.name}" for each in sorted((draw.place / "run").iterdir()) if each.suffix in (".json", ".yaml")]
    name = draw.chance.choice(["job.yaml", "one.yaml", "fleet.yaml", "plan.json", "profile.json", *run])
    commands = {
        "job.yaml": GOOD["train"], "one.yaml": GOOD["devices"], "fleet.yaml": ON_PAPER, "plan.json": GOOD["simulate"],
        "profile.json": GOOD["simulate"],
    }  # fmt: skip
    content = yaml.safe_load((draw.place / name).read_text())
    places = [at for at in places_of(content) if isinstance(value_at(content, at), str)]
    if not places:
        return of_letters(draw)
    at = draw.chance.choice(places)
    spoiled = draw.chance.choice(("\x1b[31mred", "\x1b]0;title\x07", "\x9b31m", "a\rb", "a\u202eb", "\x1b[2J"))
    value_at(content, at[:-1])[at[-1]] = spoiled + str(value_at(content, at))
    text = json.dumps(content) if name.endswith(".json") else yaml.safe_dump(content)
    command = commands.get(name) or draw.chance.choice((GOOD["report"], ("simulate", "run")))
    return Case(
        kind=draw.kind,
        arguments=command,
        files={name: _bytes(text)},
        names=(name, "run", "plan", "profile", "model", *_fields()),
    )


KINDS: dict[str, tuple[int, Callable[[Draw], Case]]] = {
    "job": (5, of_job),
    "override": (6, of_override),
    "cluster": (3, of_cluster),
    "fleet": (3, of_fleet),
    "plan": (3, of_plan),
    "profile": (3, of_profile),
    "run directory": (6, of_run),
    "checkpoint": (4, of_checkpoint),
    "crafted checkpoint": (2, of_crafted_checkpoint),
    "exported model": (2, of_exported),
    "data": (2, of_data),
    "schedule": (1, of_schedule),
    "option": (7, of_option),
    "command line": (2, of_command_line),
    "environment": (3, of_environment),
    "odd file": (8, of_odd_file),
    "number": (6, of_number),
    "count": (4, of_count),
    "letters": (3, of_letters),
}
"""The kinds of cases, and how often each is drawn."""


def _fields() -> list[str]:
    found = []
    for section in Job.sections():
        kind: Any = Job.model_fields[section].annotation
        found += [f"{section}.{name}" for name in kind.model_fields]
    return found


def _numeric_fields() -> list[str]:
    """Fields of a job that take a number and no text."""
    found = []
    for section in Job.sections():
        kind: Any = Job.model_fields[section].annotation
        for name, info in kind.model_fields.items():
            if re.search(r"\b(int|float)\b", str(info.annotation)) and not re.search(
                r"str|Literal|tuple", str(info.annotation)
            ):
                found.append(f"{section}.{name}")
    return found


def _read_files(place: Path) -> list[tuple[tuple[str, ...], str]]:
    """Each command with each file that it reads."""
    found: list[tuple[tuple[str, ...], str]] = [
        *((GOOD[verb], name) for verb in VERBS for name in ("job.yaml", "one.yaml", "text.txt", "model.py")),
        (GOOD["devices"], "one.yaml"), (GOOD["simulate"], "plan.json"), (GOOD["simulate"], "profile.json"), (GOOD["simulate"], "job.yaml"),
        ((*GOOD["train"], "--plan", "plan.json"), "plan.json"), ((*GOOD["plan"], "--profile", "profile.json"), "profile.json"),
        ((*GOOD["simulate"], "--schedule", "schedule.csv"), "schedule.csv"), (ON_PAPER, "fleet.yaml"),
        ((*GOOD["train"], "--set", "data.text=null", "--set", "data.jsonl=lines.jsonl"), "lines.jsonl"),
        ((*GOOD["train"], "--set", "data.text=null", "--set", "data.tokens=tokens.npy"), "tokens.npy"),
    ]  # fmt: skip
    for path in sorted((place / "run").iterdir()):
        if path.suffix in (".json", ".jsonl", ".yaml") and path.name != "trace.json":
            found += [(command, f"run/{path.name}") for command in (GOOD["report"], ("simulate", "run"), RESUME)]
    for folder, command in (
        ("run/checkpoint/step-4", RESUME),
        ("hf/model", ("train", "from_hf.yaml", *ON_ONE)),
    ):
        found += [(command, f"{folder}/{path.name}") for path in sorted((place / folder).iterdir())]
    return found


def _commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app.application())
    return dict(group.commands)


def _value(parameter: Any, chance: random.Random) -> str:
    if chance.random() < 0.6 and parameter.metavar in FILES:
        return chance.choice(PATHS)
    value = chance.choice(VALUES)
    if isinstance(value, int) and abs(value) > 10**40:
        value = "9" * 500
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return _argument("/proc/none" if text == "/" else text)


def _argument(text: str) -> str:
    """Without what the system passes to no program."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode("utf-8")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _json(path: Path, chance: random.Random) -> bytes:
    return _bytes(as_json(json.loads(path.read_text()), chance))


def _any(path: Path, chance: random.Random) -> bytes | None:
    """The file gone, emptied, cut, with a byte flipped, with a value replaced, or with something else in its place."""
    whole = path.read_bytes()
    spot = chance.randrange(len(whole))
    match chance.randrange(8):
        case 0:
            return None
        case 1:
            return chance.choice(
                (b"", b"\x00" * 64, b"\x80\x04\x95", b"PK\x03\x04", b"[]", b"{}", b"null", b"\xff\xfe{")
            )
        case 2:
            return whole[:spot]
        case 3:
            return whole[:spot] + bytes([whole[spot] ^ (1 << chance.randrange(8))]) + whole[spot + 1 :]
        case _ if path.suffix == ".json":
            return _json(path, chance)
        case _ if path.suffix == ".jsonl":
            lines = path.read_text().splitlines()
            line = chance.randrange(len(lines))
            lines[line] = as_json(json.loads(lines[line]), chance)
            return _bytes("\n".join(lines) + "\n")
        case _ if path.suffix == ".yaml":
            return _bytes(as_yaml(yaml.safe_load(whole), chance))
        case _ if path.suffix in (".txt", ".py", ".csv"):
            return _bytes(as_text(whole.decode(), chance))
        case _:
            return whole[:spot] + bytes(chance.randrange(256) for _ in range(16)) + whole[spot + 16 :]


def value_at(content: Any, at: tuple[Any, ...]) -> Any:
    """What stands at a place of a nested value."""
    for key in at:
        content = content[key]
    return content
