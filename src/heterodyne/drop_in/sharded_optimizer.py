"""An optimizer whose state is sharded over the ranks by share (ZeRO stage 1, Rajbhandari et al., SC 2020)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from heterodyne.drop_in.sampler import require_shares
from heterodyne.errors import HeterodyneError
from heterodyne.plan.state_shards import Cut, Range, cut_tensors
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.weights.optimizer_probe import reach_of
from heterodyne.runtime.weights.pieces import Piece, Pieces, Place, joined

__all__ = ["ZeroRedundancyOptimizer"]

_EXCHANGED = 2**25  # bytes of parameters that are exchanged at once


class ZeroRedundancyOptimizer(Optimizer):
    """As `torch.distributed.optim.ZeroRedundancyOptimizer`, with a share of the state on each rank that its memory suggests.

    Every rank updates its share of the parameters, and all of them exchange what they have updated. Gradients and parameters are whole on
    every rank. Parameters are cut wherever a share ends, if the optimizer updates each element by itself; else no parameter is cut.

    Args:
        params: parameters or groups of them, the same on every rank.
        optimizer_class: makes an optimizer of parameters; it gets ``defaults``.
        shares: of each rank in the state, in any unit. None: by the memory that each has free.

    Raises HeterodyneError for an optimizer that looks at the whole model at once (LBFGS), and for shares that are none.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        *,
        shares: Sequence[float] | None = None,
        **defaults: Any,
    ) -> None:
        super().__init__(params, defaults)
        self._parameters: list[nn.Parameter] = [p for group in self.param_groups for p in group["params"]]
        device = self._parameters[0].device
        self._communicator = Communicator(rank=dist.get_rank(), world_size=dist.get_world_size(), device=device)
        process_group = self._communicator.process_group(range(dist.get_world_size()))
        assert process_group is not None
        self._process_group = process_group
        self._process_group.share_ranges(_EXCHANGED)
        if shares is None:
            shares = [max(1, free) for free in self._communicator.all_gather_object(_free_bytes(device))]
        try:
            tried = reach_of(
                partial(_small_groups, optimizer_class, defaults, self.param_groups), _named(self.param_groups)
            )
        except HeterodyneError as error:
            name = getattr(optimizer_class, "__name__", "the optimizer")
            raise HeterodyneError(f"the state of {name} cannot be sharded, so use it as it is: {error}") from error
        if tried.reach == "model":
            raise HeterodyneError(
                f"{tried.name} looks at the whole model at once{tried.untried and f' ({tried.untried})'}, so its state cannot be sharded: "
                "use it as it is"
            )
        self._cut(require_shares(shares, dist.get_world_size()), whole_weights=tried.reach == "weight")
        self._own = optimizer_class([self._own_group(group) for group in self.param_groups], **defaults)
        for group, own in zip(self.param_groups, self._own.param_groups, strict=True):
            group.update({name: value for name, value in own.items() if name not in group})
        self.defaults = {**self._own.defaults, **self.defaults}  # schedulers read some there
        self._consolidated: dict[str, Any] | None = None

    def _cut(self, shares: Sequence[float], *, whole_weights: bool) -> None:
        """Say which elements are this rank's, and in which runs of parameters they are exchanged."""
        rank = self._communicator.rank
        whole = [round(1e6 * share / max(shares)) for share in shares]
        self._slices: dict[int, tuple[Range, nn.Parameter]] = {}  # of this rank, by the number of the parameter
        self._runs: list[
            tuple[list[int], list[Range]]
        ] = []  # numbers of parameters, and the range of each rank in them
        order = sorted(range(len(self._parameters)), key=lambda number: _kind(self._parameters[number]))
        for _, numbers in groupby(order, key=lambda number: _kind(self._parameters[number])):
            alike = list(numbers)
            together = [self._parameters[number] for number in alike]
            atomic = whole_weights or not all(parameter.is_contiguous() for parameter in together)
            ranges, cuts = cut_tensors([p.numel() for p in together], whole, whole_weights=atomic)
            for cut in cuts:
                if cut.owner == rank:
                    self._slices[alike[cut.tensor]] = (cut.start, cut.stop), _part(together[cut.tensor], cut)
            self._runs += _runs(alike, [p.numel() for p in together], ranges, _EXCHANGED // together[0].element_size())

    def _own_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group of parameters with what this rank has of it."""
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        own = [self._slices[numbers[id(p)]][1] for p in group["params"] if numbers[id(p)] in self._slices]
        return {**{name: value for name, value in group.items() if name != "params"}, "params": own}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters, each on the rank that has its state, and exchange them. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, own in zip(self.param_groups, self._own.param_groups, strict=True):
            own.update({name: value for name, value in group.items() if name not in ("params", "param_names")})
        self._consolidated = None
        for number, ((start, stop), part) in self._slices.items():
            gradient = self._parameters[number].grad
            self._follow_memory(number)
            if gradient is not None and gradient.is_sparse:
                raise HeterodyneError(
                    "gradients are sparse (an Embedding with sparse=True), and only whole optimizers take those: give these parameters "
                    "an optimizer of their own"
                )
            if part is not self._parameters[number]:
                part.grad = None if gradient is None else gradient.reshape(-1)[start:stop]
        self._own.step()
        for number, (_, part) in self._slices.items():
            if part is not self._parameters[number]:
                part.grad = None
        self._exchange()
        return loss

    @torch.no_grad()
    def _follow_memory(self, number: int) -> None:
        """Let this rank's part of a parameter be where the parameter is now. Raise HeterodyneError if that is not possible."""
        parameter, ((start, stop), part) = self._parameters[number], self._slices[number]
        if part is parameter:
            return
        if parameter.dtype != part.dtype or parameter.device != part.device or not parameter.is_contiguous():
            raise HeterodyneError(
                f"a parameter of shape {list(parameter.shape)} has another dtype, device or memory format than when the optimizer was "
                "made: make it after the model was converted"
            )
        if part.data_ptr() != parameter.data_ptr() + start * parameter.element_size():
            part.data = parameter.detach().view(-1)[start:stop]

    @torch.no_grad()
    def _exchange(self) -> None:
        for numbers, ranges in self._runs:
            updated = [self._parameters[number] for number in numbers]
            flat = torch.cat([parameter.reshape(-1) for parameter in updated])
            self._process_group.all_gather_ranges(flat, ranges).wait()
            parts = torch.split(flat, [parameter.numel() for parameter in updated])
            for parameter, values in zip(updated, parts, strict=True):
                parameter.copy_(values.view(parameter.shape))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse to add one after the optimizer was made; its shares are dealt by then."""
        if hasattr(self, "_runs"):
            raise HeterodyneError("parameters are dealt over the ranks when the optimizer is made: make another one")
        super().add_param_group(param_group)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all ranks on rank ``to``, where `state_dict` then returns it. Collective."""
        places: dict[Tensor, int] = {part: number for number, (_, part) in self._slices.items()}
        own = {places[part]: state for part, state in self._own.state.items()}
        found: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(self._parameters):
            pieces = self._pieces(number, own[number]) if number in own else {}
            of_ranks = self._communicator.all_gather_object(pieces)
            if self._communicator.rank == to:
                found |= {number: _joined(parameter, of_ranks)} if any(of_ranks) else {}
        self._consolidated = {"state": found} if self._communicator.rank == to else None

    def _pieces(self, number: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter with what is as long as this rank's part of it as a piece."""
        (start, stop), part = self._slices[number]
        shape = tuple(self._parameters[number].shape)
        return {
            name: Pieces(shape, (Piece(Place((), (start, stop)), value.detach().reshape(-1).cpu()),))
            if isinstance(value, Tensor) and value.shape == part.shape and value.dim()
            else value.cpu()
            if isinstance(value, Tensor)
            else value
            for name, value in state.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, as the optimizer without shards has it, on the rank that has consolidated it.

        Raises RuntimeError elsewhere, as PyTorch's does.
        """
        if self._consolidated is None:
            raise RuntimeError(
                "the state is sharded: call consolidate_state_dict(to=rank) on every rank first, then state_dict() on that rank"
            )
        return {**super().state_dict(), **self._consolidated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's share of a state that `state_dict`, or the optimizer without shards, has returned."""
        super().load_state_dict({**state_dict, "state": {}})
        with torch.no_grad():
            own = {
                part: {name: self._taken(value, number) for name, value in state_dict["state"][number].items()}
                for number, (_, part) in self._slices.items()
                if number in state_dict["state"]
            }
        places = {part: place for place, part in enumerate(p for g in self._own.param_groups for p in g["params"])}
        groups = self._own.state_dict()["param_groups"]
        self._own.load_state_dict(
            {"state": {places[part]: state for part, state in own.items()}, "param_groups": groups}
        )

    def _taken(self, value: Any, number: int) -> Any:
        (start, stop), part = self._slices[number]
        if not isinstance(value, Tensor) or value.shape != self._parameters[number].shape or not value.dim():
            return value
        taken = value.reshape(-1)[start:stop].reshape(part.shape)
        return torch.empty_like(part, dtype=value.dtype).copy_(
            taken
        )  # in its memory format, which fused kernels expect


def _named(groups: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return all parameters by names that tell their group and their number of dims, which the reach of an optimizer may depend on."""
    return {
        f"{_letters(number)}.{_letters(parameter.dim())}.{place}": parameter
        for number, group in enumerate(groups)
        for place, parameter in enumerate(group["params"])
    }


def _letters(number: int) -> str:
    return "x" * number + "y"  # a digit would not tell names apart


def _small_groups(
    optimizer_class: Callable[..., Optimizer],
    defaults: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    named_parameters: Iterable[tuple[str, nn.Parameter]],
) -> Optimizer:
    """Make the optimizer of small parameters in the place of those of the groups, each with the options of its group."""
    of_groups: dict[int, list[nn.Parameter]] = {}
    for name, parameter in named_parameters:
        of_groups.setdefault(name.partition(".")[0].count("x"), []).append(parameter)
    options = [
        {name: value for name, value in group.items() if name not in ("params", "param_names")} for group in groups
    ]
    return optimizer_class(
        [{**options[number], "params": held} for number, held in sorted(of_groups.items())], **defaults
    )


def _kind(parameter: Tensor) -> tuple[str, str]:
    return str(parameter.dtype), str(parameter.device)


def _part(parameter: nn.Parameter, cut: Cut) -> nn.Parameter:
    """Return those elements of a parameter, in its own memory; the parameter itself if they are all."""
    if cut.stop - cut.start == parameter.numel():
        return parameter
    return nn.Parameter(parameter.detach().view(-1)[cut.start : cut.stop], requires_grad=parameter.requires_grad)


def _runs(
    numbers: Sequence[int], sizes: Sequence[int], ranges: Sequence[Range], most: int
) -> list[tuple[list[int], list[Range]]]:
    """Return runs of consecutive parameters of about ``most`` elements, each with the range that every rank has in it."""
    found: list[tuple[list[int], int, int]] = []
    at = 0
    for number, size in zip(numbers, sizes, strict=True):
        if not found or found[-1][2] - found[-1][1] + size > most:
            found.append(([], at, at))
        run, first, _ = found.pop()
        at += size
        found.append(([*run, number], first, at))
    return [
        (run, [(min(max(low, first), stop) - first, min(max(high, first), stop) - first) for low, high in ranges])
        for run, first, stop in found
    ]


def _joined(parameter: Tensor, of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a parameter from what the ranks have of it."""
    first = next(filter(None, of_ranks))
    return {
        name: joined(value.whole, [piece for of in of_ranks if of for piece in of[name].of]).view(parameter.shape)
        if isinstance(value, Pieces)
        else value
        for name, value in first.items()
    }


def _free_bytes(device: torch.device) -> int:
    """Return the memory that nobody uses, of an accelerator or of the host."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    return int(torch.accelerator.get_memory_info(device)[0])
