"""The update: AdamW, SGD or Adafactor of PyTorch, or torchao's AdamW with its state in 8 bits, with a learning rate that is a pure function
of the step; or the user's own optimizer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from heterodyne.errors import CheckpointError, HeterodyneError
from heterodyne.job import OptimizerSection
from heterodyne.runtime.weights.parameter_groups import grouped_as, set_rate
from heterodyne.runtime.weights.wrapped_state import has_wrapped, unwrapped, wrapped

__all__ = [
    "OptimizerFactory",
    "decides_on_device",
    "initialise_state",
    "learning_rate",
    "load_state_by_name",
    "make_optimizer",
    "moves_by_itself",
    "norms_and_biases",
    "optimizer_of",
    "require_kept_by_name",
    "require_optimizer_library",
    "state_by_name",
    "takes_names",
]

OptimizerFactory: TypeAlias = Callable[..., torch.optim.Optimizer]
"""Called with the parameters of this rank; with ``(name, parameter)`` pairs if its first argument is called ``named_parameters``."""

_NAMED = "named_parameters"
_FIXED_STATE = (torch.optim.AdamW, torch.optim.SGD)
"""Whose state of a parameter has always the same entries."""


def learning_rate(section: OptimizerSection, step: int, total_steps: int) -> float:
    """The rate of a step, counted from 0.

    Linear warm-up: (step + 1) / warmup_steps of ``lr``. Then, for ``cosine``, half a cosine from ``lr`` at the end of the warm-up
    to ``min_lr_ratio * lr`` at the last step (Loshchilov & Hutter, "SGDR", 2017, without restarts); later steps stay there.
    """
    if step < section.warmup_steps:
        return section.lr * (step + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.lr
    length = max(1, total_steps - 1 - section.warmup_steps)
    progress = min(1.0, (step - section.warmup_steps) / length)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return section.lr * (section.min_lr_ratio + (1 - section.min_lr_ratio) * cosine)


def make_optimizer(
    section: OptimizerSection, parameters: Mapping[str, nn.Parameter], *, undecayed: Collection[str] = ()
) -> torch.optim.Optimizer:
    """PyTorch's own, in its fused form if it has one; those of ``undecayed`` have no weight decay. There may be no parameters.

    Always two groups, decayed and not, so that every rank has the same ones.
    """
    decayed = [p for name, p in parameters.items() if name not in undecayed]
    others = [p for name, p in parameters.items() if name in undecayed]
    groups = [{"params": decayed, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if section.name == "adamw":
        return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
    if section.name == "adafactor":
        # Weight by weight: what comes and goes in an update would else be as large as all of them.
        return torch.optim.Adafactor(groups, lr=section.lr, foreach=False)
    if section.name == "adamw8bit":
        made: torch.optim.Optimizer = _adamw_in_8_bits()(groups, lr=section.lr, betas=section.betas, eps=section.eps)
        return made
    return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum, fused=True)


def require_optimizer_library(section: OptimizerSection) -> None:
    """Raises HeterodyneError where a library that it needs is missing."""
    if section.name == "adamw8bit":
        _adamw_in_8_bits()


def _adamw_in_8_bits() -> Callable[..., torch.optim.Optimizer]:
    """torchao's. Raises HeterodyneError where that is missing."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise HeterodyneError(
            "optimizer.name adamw8bit keeps its state by torchao, which is not installed: pip install torchao, or take adamw or adafactor"
        ) from error
    found: Callable[..., torch.optim.Optimizer] = AdamW8bit
    return found


def norms_and_biases(module: nn.Module) -> frozenset[str]:
    """The parameters that are usually not decayed: those of normalisations, biases, and whatever has fewer than two dims.

    A normalisation is a module with ``norm`` in the name of its class; a bias is called so at the end of its name. Of tied parameters
    all names.
    """
    found = set()
    for path, part in module.named_modules(remove_duplicate=False):
        norm = "norm" in type(part).__name__.lower()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if norm or parameter.dim() < 2 or name.lower().endswith("bias"):
                found.add(f"{path}.{name}" if path else name)
    return frozenset(found)


def optimizer_of(
    factory: OptimizerFactory,
    parameters: Mapping[str, nn.Parameter],
    originals: Mapping[str, nn.Parameter] | None = None,
    *,
    every: Mapping[str, nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """What the factory makes of the parameters of this rank.

    ``originals``: those of the model, where ``parameters`` may be shards or copies of them; groups are as the factory makes them of these.
    ``every``: all that the model has, on the meta device where other ranks hold them. A factory that fails on those of this rank alone,
    since it asks for some by name, makes its groups of these.

    A rank that holds none has it made of an empty tensor, which is then taken out: so it has the same groups, for schedulers.
    Raises HeterodyneError if that is no optimizer.
    """
    held = dict(parameters) or {"none.weight": nn.Parameter(torch.empty(0, 0))}
    try:
        optimizer = _made(factory, held)
    except Exception:
        if every is None or len(every) <= len(parameters):
            raise
        optimizer = _made(factory, every)
        if any(every[name] is not own and every[name] in optimizer.state for name, own in parameters.items()):
            raise  # its state is of other shapes already
        grouped_as(optimizer, optimizer, parameters, every)
        for other in [
            p for p in optimizer.state if isinstance(p, Tensor) and all(p is not o for o in parameters.values())
        ]:
            del optimizer.state[other]
        return optimizer
    missing = [name for name in ("param_groups", "state", "step", "zero_grad") if not hasattr(optimizer, name)]
    if missing:
        raise HeterodyneError(
            f"optimizer= gave {optimizer!r}, which has no {missing[0]}: pass a function that makes a torch.optim.Optimizer of the "
            "parameters it is given, and returns it"
        )
    others = originals is not None and any(made is not originals[name] for name, made in parameters.items())
    if originals is not None and (others or len(parameters) < len(originals)):
        grouped_as(optimizer, _made(factory, originals), parameters, originals)
    elif not parameters:
        for group in optimizer.param_groups:
            group["params"] = []
            if "param_names" in group:
                group["param_names"] = []
    return optimizer


def _made(factory: OptimizerFactory, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return factory(list(parameters.items())) if takes_names(factory) else factory(list(parameters.values()))


def takes_names(factory: OptimizerFactory) -> bool:
    """Whether its first argument is called ``named_parameters``."""
    try:
        names = list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # what is written in C may have no signature
        return False
    return names[:1] == [_NAMED]


def require_kept_by_name(optimizer: torch.optim.Optimizer) -> None:
    """Raises CheckpointError for an optimizer whose ``state_dict()`` has more than the state of parameters and the options of groups.

    Whose parameters that belongs to nobody knows, so no checkpoint can have it, and training would go on otherwise after a resume.
    """
    own = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    if not own and not optimizer._optimizer_state_dict_post_hooks:
        return
    more = sorted(map(str, set(optimizer.state_dict()) - {"state", "param_groups"}))
    if more:
        raise CheckpointError(
            f"{type(optimizer).__name__}.state_dict() has {', '.join(more[:5])} besides 'state' and 'param_groups', which a checkpoint "
            "cannot keep: hold what belongs to a parameter in optimizer.state[parameter], and numbers in its param_groups"
        )


def state_by_name(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """The state of each parameter under its name; a parameter that was never updated has none. Tensors are not copied; of one that
    wraps others those are there.
    """
    return {name: unwrapped(optimizer.state[p]) for name, p in parameters.items() if p in optimizer.state}


def load_state_by_name(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any]
) -> None:
    """The inverse of `state_by_name`; tensors are copied to the device of their parameter. Raises CheckpointError."""
    unknown = sorted(set(state) - set(parameters))
    if unknown:
        raise CheckpointError(
            f"the optimizer's state names parameters that the model does not train: {', '.join(unknown[:5])}"
        )
    optimizer.state.clear()
    if type(optimizer) in _FIXED_STATE and state:
        _require_alike(optimizer, parameters, state)
    made: dict[str, dict[str, Any]] = {}
    if any(map(has_wrapped, state.values())):
        initialise_state(optimizer)
        made = {name: optimizer.state[parameters[name]] for name in state}
        optimizer.state.clear()
    for name, values in state.items():
        parameter = parameters[name]
        if has_wrapped(values):
            optimizer.state[parameter] = wrapped(name, values, made[name])
            continue
        optimizer.state[parameter] = {
            key: _copied(value, parameter) if isinstance(value, Tensor) else value for key, value in values.items()
        }


def _require_alike(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raises CheckpointError for a state of other entries or shapes than the optimizer makes. Leaves the optimizer without any."""
    initialise_state(optimizer)
    for name, values in state.items():
        made = {key: _shape(value) for key, value in optimizer.state[parameters[name]].items()}
        given = {key: _shape(value) for key, value in values.items()}
        if given != made:
            raise CheckpointError(f"the optimizer's state of {name} is {given}, and this optimizer's is {made}")
    optimizer.state.clear()


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its state for every parameter that has none, so that there is something to receive it in.

    A step with zero gradients and rate zero makes the state and changes no parameter.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    missing = [p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state]
    kept = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    for parameter, _ in kept:
        parameter.grad = None
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        set_rate(group, 0.0)
    optimizer.step()
    for parameter, gradient in kept:
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_rate(group, rate)


def _copied(value: Tensor, parameter: nn.Parameter) -> Tensor:
    return value.detach().to(device=parameter.device, copy=True)


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step leaves weights and state as they are where its ``found_inf`` is 1, as `torch.amp.GradScaler` uses it.

    SGD is left out: a first step that is left out leaves its momentum uninitialised.
    """
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    own = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return own and not hooks and all(group.get("fused") for group in optimizer.param_groups)


def moves_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it has methods that torch's optimizers do not have: they may move weights outside of its step."""
    kinds = [kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith("torch.")]
    made = {name for kind in kinds for name, value in vars(kind).items() if callable(value)}
    return any(not name.startswith("_") for name in made - set(dir(torch.optim.Optimizer)))
