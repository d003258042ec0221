"""fp32 master weights of parameters in 16 bits (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1).

bf16 has 8 significant bits: 256 + 1 is 256, for gradients that are summed over micro-batches as for weights that take small steps. So
the gradients of such parameters are accumulated, reduced and clipped in fp32 (``Tensor.grad_dtype``), the optimizer updates
fp32 copies, and the model gets these rounded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from heterodyne.errors import PlanError
from heterodyne.plan.state_shards import Range
from heterodyne.runtime.stages import host_link
from heterodyne.runtime.weights.pieces import Pieces, as_tensor

__all__ = ["MasterWeights", "gradient_dtype"]

_MASTER = "master"
_NONE_SHARDED: Mapping[str, Range] = {}
_NO_SHARDS: Mapping[str, torch.Tensor] = {}


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """In which the gradients of a parameter are accumulated."""
    return parameter.grad_dtype or parameter.dtype


class MasterWeights:
    """What the optimizer of one rank updates.

    Args:
        parameters: every trained parameter of this rank by name. Those in 16 bits get fp32 gradients until `close`.
        ranges: of those whose state is sharded, the elements ``[start, stop)``, row after row, that this rank updates; there may be none.
        shards: what this rank keeps of parameters that are sharded themselves; the others hold what is updated of them.
        on_host: what is updated, and the optimizer's state of it, is kept in the memory of the host: gradients go there for a step, and
            new weights come back. The update waits until all gradients have come, what the device is asked for next until the weights have;
            the next gradients leave behind them, so that no update writes what is still on its way.

    ``updated``: by name, what the optimizer is made of: a parameter, or the range of it, itself; of one in 16 bits an fp32 copy (its
    master), and a copy on the host of what is kept there. A range has as many dims as its parameter, all but the last of size 1, so that
    groups may be made by the number of dims. ``own_gradients``: of what is updated, the gradients that are kept apart from
    their parameters; who sums them puts them there.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        ranges: Mapping[str, Range] = _NONE_SHARDED,
        *,
        shards: Mapping[str, torch.Tensor] = _NO_SHARDS,
        on_host: bool = False,
    ) -> None:
        self._parameters = parameters
        self._shards = shards
        self.own_gradients: dict[str, torch.Tensor] = {}
        self._on_host = on_host
        self._ranges = {n: own for n, own in ranges.items() if own != (0, parameters[n].numel())}
        self._narrow = [n for n, p in parameters.items() if p.is_floating_point() and p.itemsize < 4]
        self._masters: dict[str, nn.Parameter] = {}  # with memory of their own
        self.updated: dict[str, nn.Parameter] = {}
        for name, parameter in parameters.items():
            low, high = self._ranges.get(name, (0, 1))
            if low < high:
                self.updated[name] = self._made(name, parameter)
        for name in self._narrow:
            parameters[name].grad = None
            parameters[name].grad_dtype = torch.float32
        # Of what shares the memory of a weight, or of a shard of it.
        self._places = {name: made.data_ptr() for name, made in self.apart.items() if name not in self._masters}
        self.settled()

    def _made(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        narrow = name in self._narrow
        if not narrow and name not in self._ranges and name not in self._shards and not self._on_host:
            return parameter
        held = own = self._own_weight(name)
        if self._on_host:
            own = own.to("cpu", copy=True)
        if narrow or (name in self._ranges and name not in self._shards and not parameter.is_contiguous()):
            own = own.float() if narrow else own.clone()
        made = nn.Parameter(own)
        made.__dict__.update(parameter.__dict__)  # marks that an optimizer's groups may be made by
        if own.untyped_storage().data_ptr() != held.untyped_storage().data_ptr():
            self._masters[name] = made
        return made

    def _own_weight(self, name: str) -> torch.Tensor:
        """What this rank updates of a parameter, as the model has it."""
        parameter = self._parameters[name].detach()
        if name not in self._shards:
            return self.own_range(name, parameter)
        shard = self._shards[name]
        return shard.view(self._own_shape(name, parameter))

    def _own_shape(self, name: str, parameter: torch.Tensor) -> tuple[int, ...]:
        if name not in self._ranges:
            return tuple(parameter.shape)
        low, high = self._ranges[name]
        return (*(1,) * (parameter.dim() - 1), high - low)

    def own_range(self, name: str, whole: torch.Tensor | Pieces) -> torch.Tensor:
        """Return what this rank updates of a tensor that lies as the parameter does; a view where ``whole`` is contiguous."""
        if isinstance(whole, Pieces):
            found = whole.part(self._ranges.get(name))
            return found.view(self._own_shape(name, self._parameters[name])) if name in self._ranges else found
        if name not in self._ranges:
            return whole
        low, high = self._ranges[name]
        return whole.reshape(-1)[low:high].view(self._own_shape(name, whole))

    def keep_gradient(self, name: str, own: torch.Tensor) -> None:
        """Take the gradient of what is updated of a parameter, row after row, which is kept apart from it."""
        self.own_gradients[name] = own.view(self._own_shape(name, self._parameters[name]))

    @property
    def on_host(self) -> bool:
        """Whether what is updated is kept in the memory of the host."""
        return self._on_host

    @property
    def names(self) -> Collection[str]:
        """Of the parameters of this rank."""
        return self._parameters.keys()

    @property
    def apart(self) -> Mapping[str, nn.Parameter]:
        """Of what is updated, all but the parameters themselves."""
        return {name: made for name, made in self.updated.items() if made is not self._parameters[name]}

    @property
    def own_memory(self) -> Set[str]:
        """The names of those of which the model has a copy."""
        return self._masters.keys()

    @property
    def masters(self) -> Mapping[str, nn.Parameter]:
        """Of the parameters in 16 bits."""
        return {name: master for name, master in self._masters.items() if name in self._narrow}

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over weights that the model has got from elsewhere, where they are not rounded."""
        for name, master in self._masters.items():
            if name not in self._narrow:
                master.copy_(self._own_weight(name))
        self.settled()

    @torch.no_grad()
    def take(self, values: Mapping[str, torch.Tensor | Pieces]) -> None:
        """Take over these values of parameters, as this rank holds them, which the model has been given already."""
        for name, value in values.items():
            if name in self._masters:
                self._masters[name].copy_(self.own_range(name, value))

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Others may write to the model while the block runs, if at its end the masters have what the model has, or it is as it was."""
        self._take_over_changes()
        try:
            yield
        finally:
            self.settled()

    def gradients(self) -> dict[str, torch.Tensor]:
        """By name those that there are of what this rank updates."""
        found = {name: self._gradient(name) for name in self.updated}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def _gradient(self, name: str) -> torch.Tensor | None:
        whole = self._parameters[name].grad
        return self.own_gradients.get(name) if whole is None else self.own_range(name, whole)

    def step(self, optimizer: torch.optim.Optimizer, *, unless: torch.Tensor | None = None) -> None:
        """Update by the gradients of the parameters, and round the masters into these. ``unless``: 1, on the device, where nothing shall
        change, for an optimizer that `decides_on_device`.

        Weights that the user has changed since the last step, in place or by others in their place, are taken over first.
        """
        self._take_over_changes()
        apart = {
            name: made
            for name, made in self.updated.items()
            if made is not self._parameters[name] or name in self.own_gradients
        }
        self._hand_over(apart)
        with _laid_out_alike(self.updated.values()), _left_out(optimizer, unless):
            optimizer.step()
        for name in [name for name in self._places if self._is_elsewhere(name)]:
            if name in self._shards:
                raise PlanError(_replaced(name))
            self._part(name)
        for made in apart.values():
            made.grad = None
        self.round()

    def _hand_over(self, apart: Mapping[str, nn.Parameter]) -> None:
        """Give what is updated its gradients; those that go to the host all set out before the first is waited for."""
        leaving = None
        for name, made in apart.items():
            gradient = self._gradient(name)
            if gradient is None or gradient.device == made.device:
                made.grad = gradient
                continue
            made.grad = torch.empty_like(gradient, device=made.device, pin_memory=True)
            host_link.copy(made.grad, gradient)
            leaving = gradient.device
        if leaving is not None:
            torch.accelerator.current_stream(leaving).synchronize()

    def settled(self) -> None:
        """What the model has now is what the masters have; what changes it from here on is the user."""
        held = {name: self._parameters[name] for name in self.apart if name not in self._shards}
        self._versions = {name: p._version for name, p in held.items() if name in self._masters}
        self._memory = {name: p.data for name, p in held.items()}
        kept = [name for name in self._masters if name in self._shards and self._parameters[name].numel() == 1]
        self._single = {name: self._shards[name].clone() for name in kept if name in self.updated}

    @property
    def copies(self) -> dict[str, nn.Parameter]:
        """The parameters that are copies of what is updated, and are whole here."""
        return {name: self._parameters[name] for name in self._masters if name not in self._shards}

    @torch.no_grad()
    def _take_over_changes(self) -> None:
        """Of weights that have been written since `settled`, as autograd counts it, or that lie elsewhere now (``.data =``): these
        values go to the memory that is updated. So does what was written to a shard, if that is a single element."""
        for name, memory in self._memory.items():
            parameter = self._parameters[name]
            if self._is_replaced(name):
                memory.copy_(parameter)
                parameter.data = memory
            elif name not in self._masters or parameter._version == self._versions[name]:
                continue
            if name in self._masters:
                self._masters[name].copy_(self._own_weight(name))
        for name, left in self._single.items():
            if not torch.equal(left, self._shards[name]):
                self._masters[name].copy_(self._own_weight(name))

    def _is_replaced(self, name: str) -> bool:
        """Whether the user has put other memory in the place of a weight's."""
        parameter, memory = self._parameters[name], self._memory[name]
        return parameter.data_ptr() != memory.data_ptr() or parameter.stride() != memory.stride()

    def _is_written(self, name: str) -> bool:
        """Whether the user has given a weight, of which what is updated is a copy, values that were not taken over yet."""
        return name in self._versions and (
            self._is_replaced(name) or self._parameters[name]._version != self._versions[name]
        )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """What the block writes into the model comes from what is updated, so that it is not taken over as a change of the user's."""
        written = {name for name in self._versions if self._is_written(name)}
        yield
        self._versions = {n: -1 if n in written else self._parameters[n]._version for n in self._versions}

    @torch.no_grad()
    def give(self, moved: Iterable[str]) -> str | None:
        """Give the model what was moved outside of a step. Returns why one of them cannot be; None if all can."""
        fault = None
        with self.writing():
            for name in moved:
                if self._is_replaced_in_shard(name):
                    fault = _replaced(name)
                elif self._is_written(name):
                    fault = _written_twice(name)
                else:
                    self._part(name)
                    if name in self._masters:
                        self._give(name, self._masters[name])
        return fault

    def _is_elsewhere(self, name: str) -> bool:
        """Whether the optimizer has put other memory in the place of what shared that of a weight."""
        return name in self._places and self.updated[name].data_ptr() != self._places[name]

    def _is_replaced_in_shard(self, name: str) -> bool:
        return name in self._shards and self._is_elsewhere(name)

    def _part(self, name: str) -> None:
        """The weight gets memory of its own where the optimizer has put other memory in its place: it may swap the old one back."""
        if not self._is_elsewhere(name):
            return
        parameter, fresh = self._parameters[name], self._memory[name].clone()
        if not self._is_replaced(name):
            parameter.data = fresh
        self._memory[name] = fresh
        self._masters[name] = self.updated[name]
        self._versions[name] = parameter._version
        del self._places[name]

    @torch.no_grad()
    def round(self) -> None:
        """Give the model the masters, rounded."""
        for name, master in self._masters.items():
            self._give(name, master)

    def _give(self, name: str, value: torch.Tensor) -> None:
        parameter = self._parameters[name].detach()
        if name in self._shards or name not in self._ranges or parameter.is_contiguous():
            host_link.copy(self._own_weight(name), value)
            return
        whole = parameter.contiguous()
        host_link.copy(self.own_range(name, whole), value)
        parameter.copy_(whole)

    def with_masters(self, state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The optimizer's state by name, with the master of each parameter that has one."""
        found = {name: dict(values) for name, values in state.items()}
        for name, master in self._masters.items():
            if name in self._narrow:
                found.setdefault(name, {})[_MASTER] = master.detach()
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The optimizer's state of what is updated here, from that of the parameters of this rank, whole; see `with_masters`.

        The model's own weights have been loaded before. Without a master in ``state`` the weight itself is taken. A master of a parameter
        that has none here, because the model is now in fp32, is its weight.
        """
        rest: dict[str, dict[str, Any]] = {}
        for name, values in state.items():
            if _MASTER in values and name not in self._narrow:
                if name in self._shards:
                    self._own_weight(name).copy_(self.own_range(name, values[_MASTER]))
                else:
                    self._parameters[name].copy_(as_tensor(values[_MASTER]))
            others = [key for key in values if key != _MASTER]
            if others and name in self.updated:
                rest[name] = {key: self._own_of(name, values[key]) for key in others}
        for name, master in self._masters.items():
            whole = state.get(name, {}).get(_MASTER)
            master.copy_(self._own_weight(name) if whole is None else self.own_range(name, whole))
        self.settled()
        return rest

    def _own_of(self, name: str, value: Any) -> Any:
        alike = isinstance(value, torch.Tensor | Pieces) and value.shape == self._parameters[name].shape
        return self.own_range(name, value) if alike else as_tensor(value)

    def reads(self, name: str, key: str) -> bool:
        """Whether `load` looks at this entry of the state of a parameter."""
        return name in self.updated or (name in self._parameters and key == _MASTER)

    def close(self) -> None:
        """Let the gradients of the user's parameters have their own dtype again."""
        for name in self._narrow:
            parameter = self._parameters[name]
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype


def _replaced(name: str) -> str:
    return (
        f"the optimizer has put another tensor in the place of {name!r} ('p.data = ...'), of which each device keeps a part under this "
        "plan ('zero': 3). Let it copy the values in place (p.copy_()), or write 'zero': 2"
    )


def _written_twice(name: str) -> str:
    return (
        f"between two calls of the trainer the optimizer has moved {name!r} outside of its step, and the script has written to it. This "
        "plan updates a copy of that weight (in fp32, or in the memory of the host), so it is not known which came last. Call "
        "trainer.evaluate() or validate() between the two, or keep the weights in fp32 and on the device"
    )


@contextmanager
def _left_out(optimizer: torch.optim.Optimizer, unless: torch.Tensor | None) -> Iterator[None]:
    if unless is None:
        yield
        return
    optimizer.grad_scale, optimizer.found_inf = None, unless  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


@contextmanager
def _laid_out_alike(updated: Iterable[nn.Parameter]) -> Iterator[None]:
    """Gradients have the strides of their parameters, as autograd's own have: fused updates walk through both as they lie in memory."""
    others = [(p, p.grad) for p in updated if p.grad is not None and p.grad.stride() != p.stride()]
    for parameter, gradient in others:
        parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
    yield
    for parameter, gradient in others:
        parameter.grad = gradient
