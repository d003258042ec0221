"""Every public call of Python with arguments of every wrong type, and some that are wrong in other ways, in one process.

Each must raise a `HeterodyneError` (pydantic's own error for the sections that are its models) within seconds, and change nothing.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

import heterodyne as hd

__all__ = ["Called", "bad_calls"]

LIMIT_S = 10
HUGE = 10**400
VALUES: tuple[Any, ...] = (
    None, True, 3, -1, HUGE, 2.5, float("nan"), float("inf"), "x\x1b[31m", "", "\0", b"x", [], (), {}, [3], ["x", 3], {"a": 3}, {3: "a"},
    object(), int, nn.Linear, torch.zeros(2), torch.float32, lambda: 0, iter([3]), Path("/nowhere/file"), nn.Linear(3, 2),
)  # fmt: skip
NUMBER, PATH, NAMES = (int, float), (str, Path), (tuple, list)
FUNCTION: type = type(lambda: 0)
FILE = (str, Path)

Takes = dict[str, tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Called:
    """A call with one argument spoiled. ``fault``: what was wrong with the answer, "" if it was a clear refusal."""

    call: str
    argument: str
    value: str
    said: str
    fault: str


@dataclass(frozen=True, kw_only=True)
class Call:
    """``takes``: by argument the types that it may be of (None among them as `type(None)`); ``wrong``: others of the right type."""

    name: str
    run: Callable[..., Any]
    good: dict[str, Any]
    takes: Takes
    wrong: tuple[tuple[str, Any], ...] = ()


class TooLongError(BaseException):
    """Nobody may take it for an error of theirs."""


def bad_calls() -> Iterator[Called]:
    """All of them, one after the other."""
    signal.signal(signal.SIGALRM, _over)
    with tempfile.TemporaryDirectory() as folder:
        for call in (*_before(Path(folder)), *_of_files()):
            yield from _spoiled(call)
        with _trainer() as trainer:
            for call in _of_trainer(trainer, Path(folder)):
                yield from _spoiled(call)


def _spoiled(call: Call) -> Iterator[Called]:
    for argument, takes in call.takes.items():
        for value in VALUES:
            if not isinstance(value, takes) or (isinstance(value, bool) and bool not in takes):
                yield _called(call, argument, value)
    for argument, value in call.wrong:
        yield _called(call, argument, value)


def _called(call: Call, argument: str, value: Any) -> Called:
    shown = "10**400" if value is HUGE else repr(value)[:80]
    fault = said = ""
    signal.alarm(LIMIT_S)
    try:
        call.run(**{**call.good, argument: value})
        fault = "a success that is wrong"
    except (hd.HeterodyneError, ValidationError) as error:
        said = str(error)
        fault = "an escape sequence" if "\x1b" in said and not isinstance(error, ValidationError) else ""
    except TooLongError:
        fault = "over 10 s"
    except Exception as error:  # noqa: BLE001  # it is what is looked for
        said, fault = f"{type(error).__name__}: {error}"[:300], "traceback"
    finally:
        signal.alarm(0)
    return Called(call=call.name, argument=argument, value=shown, said=said, fault=fault)


def _over(_: int, __: FrameType | None) -> None:
    raise TooLongError


def _batch() -> dict[str, torch.Tensor]:
    return {"input": torch.randn(4, 3)}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.inner(input).square().mean()


def _quick(**arguments: Any) -> hd.Distributed:
    brief = hd.PlanOptions(measure_s=0.5, rehearsal_s=0.0, check_s=0.0)
    return hd.distribute(**{"plan": brief, **arguments})


def _trainer() -> hd.Distributed:
    return _quick(model=nn.Linear(3, 2), example_batch=(torch.randn(4, 3), torch.randn(4, 2)), loss=nn.MSELoss())


def _distributed(**arguments: Any) -> None:
    with _quick(**arguments):
        pass


def _opened(**arguments: Any) -> None:
    with hd.open_session(**arguments):
        pass


def _before(folder: Path) -> Iterator[Call]:
    nothing = type(None)
    yield Call(
        name="distribute",
        run=_distributed,
        good={"model": _Model(), "example_batch": _batch()},
        takes={
            "model": (nn.Module,), "example_batch": (torch.Tensor,), "loss": (nothing, FUNCTION, nn.Module),
            "shared": (tuple, list), "optimizer": (nothing, FUNCTION, type, torch.optim.Optimizer), "plan": FILE,
            "global_batch_size": (nothing, int), "precision": (), "clip_grad_norm": NUMBER, "total_steps": (nothing, int), "seed": (int,),
            "session": (nothing,), "compile": (bool,), "run": (nothing, *PATH),
        },
        wrong=(
            *(("optimizer", value) for value in (lambda _: 3, int)),
            ("clip_grad_norm", float("nan")),
            *((name, value) for name in ("global_batch_size", "total_steps") for value in (0, -1, HUGE)),
            *(("shared", value) for value in (("y",), [3])),
            *(("plan", value) for value in ("", "nowhere", "\0", Path("/nowhere/file"))), ("run", ""), ("run", "\0"),
            ("seed", HUGE), ("precision", torch.bfloat16), ("model", nn.Linear(0, 3)), ("model", nn.Linear),
            *(("example_batch", value) for value in ([], {"x": 3}, {"input": torch.zeros(0, 3)}, iter([_batch()]))),
        ),
    )  # fmt: skip
    yield Call(
        name="LossOptions", run=hd.LossOptions, good={},
        takes={"function": (nothing, FUNCTION, nn.Module), "only": (tuple, list), "loss_count": (nothing, FUNCTION, nn.Module)},
        wrong=(*(("only", value) for value in (("y",), [3], "input")), ("loss_count", int)),
    )  # fmt: skip
    yield Call(
        name="PlanOptions", run=hd.PlanOptions, good={},
        takes={
            "plan": FILE, "micro_batch_sizes": (str, list), "profile": (nothing,), "measure_s": NUMBER, "rehearsal_s": NUMBER,
            "check_s": NUMBER,
        },
        wrong=(
            *((name, float("nan")) for name in ("measure_s", "rehearsal_s", "check_s")), ("plan", ""), ("plan", "\0"),
            *(("micro_batch_sizes", value) for value in ((), (0,), [1.5], (True,), "1", (HUGE,), list(range(1, 100)))),
        ),
    )  # fmt: skip
    yield Call(
        name="RunOptions", run=hd.RunOptions, good={"dir": folder / "run"},
        takes={"dir": (nothing, *PATH), "resume": (bool,), "trackers": NAMES, "callbacks": NAMES, "weights_at_end": ()},
        wrong=(
            ("dir", ""), ("dir", "\0"), *(("callbacks", value) for value in ([3], [hd.Callback], [None], ["x"], [lambda: 0])),
            *(("trackers", value) for value in ([3], ["x"], [{"wandb": {"x": 1}}], [None])),
        ),
    )  # fmt: skip
    yield Call(
        name="open_session", run=_opened, good={},
        takes={"cluster_file": (nothing, *PATH), "deterministic": (bool,), "tf32": (bool,)},
        wrong=(("cluster_file", "nowhere.yaml"), ("cluster_file", ""), ("cluster_file", Path("/dev/null"))),
    )  # fmt: skip
    yield Call(
        name="capture", run=hd.capture, good={"model": _Model(), "example_batch": _batch()},
        takes={"model": (nn.Module,), "example_batch": (torch.Tensor,), "shared": NAMES},
        wrong=(("shared", [3]), ("shared", ("y",)), ("example_batch", {}), ("example_batch", ()), ("model", nn.Linear(0, 3))),
    )  # fmt: skip
    yield Call(
        name="batches", run=hd.batches, good={"dataset": [_batch()] * 9, "global_batch_size": 2},
        takes={
            "dataset": (list, tuple, dict, nn.Module, torch.Tensor, FUNCTION, type(iter([])), type), "global_batch_size": (int,),
            "seed": (int,), "epochs": (nothing, int), "shuffle": (bool,), "collate": (nothing, FUNCTION, nn.Module, type),
            "pad_to": (nothing, int), "pack_to": (nothing, int), "lengths": (nothing, list, tuple, torch.Tensor), "balance": (bool,),
            "shuffle_buffer": (int,), "slots": (nothing, int), "workers": (int,), "prefetch": (int,),
        },
        wrong=(
            ("dataset", []), ("global_batch_size", 0), ("epochs", -1), ("workers", -1), ("workers", 10**6), ("prefetch", 0),
            ("lengths", [3]), ("lengths", ["x"] * 9), ("shuffle_buffer", -1), ("seed", HUGE), ("pad_to", 0),
        ),
    )  # fmt: skip
    state = hd.batches([_batch()] * 9, global_batch_size=2).state_dict()
    yield Call(
        name="Batches.load_state_dict",
        run=hd.batches([_batch()] * 9, global_batch_size=2).load_state_dict,
        good={"state": state},
        takes={"state": ()},
        wrong=tuple(("state", {**state, "steps": value}) for value in (None, "x", -1, HUGE, [])),
    )
    yield Call(
        name="Trackers", run=hd.Trackers, good={"wanted": [], "directory": folder / "t"},
        takes={"wanted": NAMES, "directory": PATH, "done": (int,), "config": (nothing, dict), "flush_s": NUMBER},
        wrong=(("wanted", ["x"]), ("wanted", [3]), ("done", -1), ("flush_s", float("nan"))),
    )  # fmt: skip
    for name, run in (("replicate", hd.replicate), ("split", hd.split)):
        yield Call(name=name, run=run, good={"device_count": 2}, takes={"device_count": (int,), "name": (nothing, str)},
                   wrong=(("device_count", 0), ("device_count", -1), ("name", "")))  # fmt: skip
    yield Call(name="set_default_strategy", run=hd.set_default_strategy, good={}, takes={"strategy": (nothing,)})


def _of_files() -> Iterator[Call]:
    wrong = tuple(("path", value) for value in ("", "\0", "nowhere", Path("/dev/zero"), Path("/tmp"), "x" * 5000))
    for kind in (hd.Plan, hd.Profile, hd.Timeline, hd.Job):
        yield Call(name=f"{kind.__name__}.load", run=kind.load, good={}, takes={"path": PATH}, wrong=wrong)
    yield Call(
        name="Plan.parse", run=hd.Plan.parse, good={}, takes={"text": (str,)}, wrong=(("text", ""), ("text", "[]"))
    )
    yield Call(
        name="OptimizerSection", run=hd.OptimizerSection, good={}, takes={"lr": NUMBER, "name": ()},
        wrong=(("lr", float("nan")), ("lr", -1.0), ("name", "x")),
    )  # fmt: skip


def _of_trainer(trainer: hd.Distributed, folder: Path) -> Iterator[Call]:
    nothing = type(None)
    batch = (torch.randn(4, 3), torch.randn(4, 2))
    state = trainer.state_dict()

    def loaned(name: Any) -> None:
        with trainer.whole_weights(name):
            pass

    for name, run in (("step", trainer.step), ("evaluate", trainer.evaluate)):
        yield Call(
            name=name,
            run=run,
            good={"batch": batch},
            takes={"batch": ()},
            wrong=(("batch", batch[:1]), ("batch", batch * 2)),
        )
    yield Call(
        name="validate", run=trainer.validate, good={"batches": [batch]}, takes={"batches": (), "metrics": (nothing, dict)},
        wrong=tuple(
            ("metrics", {"a": value})
            for value in (3, None, int, lambda _, __: 3, lambda _, __: ("x", 1), lambda _, __: (1, None), lambda _: (1, 1))
        ),
    )  # fmt: skip
    yield Call(
        name="predict",
        run=trainer.predict,
        good={"batch": batch},
        takes={"batch": (), "on": ()},
        wrong=(("on", "rank1"),),
    )
    yield Call(
        name="load_state_dict", run=trainer.load_state_dict, good={}, takes={"state": ()},
        wrong=tuple(("state", {**state, key: value}) for key in ("model", "optimizer", "step") for value in (None, -3, "x", {"a": 3}, [])),
    )  # fmt: skip
    yield Call(
        name="save_checkpoint", run=trainer.save_checkpoint, good={"directory": folder / "kept"},
        takes={"directory": PATH, "extra": (nothing, dict), "keep": (int,)},
        wrong=(("directory", ""), ("directory", "\0"), ("directory", "/proc/none"), ("extra", {"a": object()}), ("keep", 0)),
    )  # fmt: skip
    yield Call(
        name="load_checkpoint", run=trainer.load_checkpoint, good={}, takes={"directory": PATH},
        wrong=(("directory", "/nowhere"), ("directory", ""), ("directory", "\0"), ("directory", "/dev/null")),
    )  # fmt: skip
    yield Call(
        name="save_pretrained", run=trainer.save_pretrained, good={}, takes={"path": PATH},
        wrong=(("path", ""), ("path", "\0"), ("path", "/proc/none"), ("path", "/dev/null")),
    )  # fmt: skip
    yield Call(
        name="average", run=trainer.average, good={}, takes={"decay": NUMBER},
        wrong=tuple(("decay", value) for value in (-0.1, 1.5, float("nan"), HUGE)),
    )  # fmt: skip
    yield Call(name="phase", run=trainer.phase, good={"words": "x"}, takes={"words": (str,), "limit_s": NUMBER},
               wrong=(("limit_s", float("nan")), ("limit_s", -1)))  # fmt: skip
    yield Call(
        name="whole_weights", run=loaned, good={}, takes={"name": (str,)}, wrong=(("name", "nowhere"), ("name", ""))
    )
