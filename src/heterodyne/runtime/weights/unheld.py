"""Weights or gradients that not every rank holds whole: using their values between two calls of the trainer raises, on every rank.

Where a rank does not hold it, such a tensor is on the meta device, is not a number (``zero: 3``), or is a slice, and torch computes with
each of them without complaint. Between two calls its class is therefore one of our own, by which torch tells of every use
(``__torch_function__``). What is asked of shape and type is answered for the whole tensor; everything else raises a PlanError. While the
runtime works, the class is the tensor's own again.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from heterodyne.errors import PlanError
from heterodyne.plan.placement import Placement
from heterodyne.runtime.weights.gradients import refusal_of_hook
from heterodyne.runtime.weights.materialise import stored_tensors
from heterodyne.runtime.weights.outside_moves import OutsideMoves
from heterodyne.runtime.weights.ownership import Ownership

__all__ = ["UnheldWeights"]

_OF_WHOLE = frozenset(
    {".shape", ".ndim", ".dtype", ".layout", ".nbytes", ".itemsize", ".is_sparse", ".is_quantized", ".is_nested"}
    | {"size", "numel", "nelement", "dim", "ndimension", "stride", "element_size", "__len__", "is_contiguous"}
    | {"is_floating_point", "is_complex", "is_signed"}
)
"""What the whole tensor, without memory, is asked in place of this one. Attributes begin with a point."""

_OF_ITSELF = frozenset(
    {".requires_grad", ".requires_grad =", "requires_grad_", ".is_leaf", ".retains_grad", ".is_meta", ".grad_fn"}
    | {"._backward_hooks", "._post_accumulate_grad_hooks", "._version", "__dir__", "__hash__"}
    | {"_has_compatible_shallow_copy_type"}  # asks for the kind of device
)

_ATTRIBUTE = "_unheld"
_IN_PARTS = "each rank updates a part of it, and the optimizer has moved it outside of its step, so that the parts have not been exchanged"


@dataclass(kw_only=True, eq=False)
class _Unheld:
    """A weight that not every rank holds whole.

    Args:
        place: which ranks hold what of it.
        whole: a tensor of its whole shape on the meta device.
        device: of this rank.
        held: this rank holds all of it, or its optimizer updates what it holds; so that optimizer may use it.
        cleared: no step has been since its gradient was set to None, or at all.
        replicated: every rank holds all of it, and of its gradient after a step only the part that it updates.
        moves: of the optimizer that updates it in parts and may move it outside of its step; None: it does not.
    """

    name: str
    place: str
    whole: Tensor
    device: torch.device
    held: bool
    cleared: bool = True
    replicated: bool = False
    moves: OutsideMoves | None = None

    def refuse(self, use: str) -> NoReturn:
        """Raise PlanError for this use of the tensor's values."""
        if self.replicated and use == ".grad":
            raise PlanError(
                f"{use} needs the gradient of {self.name!r}, of which each rank keeps the part that it updates ('zero': 1 or 2). The norm "
                "of all gradients is .grad_norm of what step() returns, where clip_grad_norm is given to hd.distribute; under a plan with "
                "'zero': 0 every rank has the gradients of the last step"
            )
        raise PlanError(
            f"{use} needs the values of {self.name!r}, which not every rank holds whole under this plan: {self.place}. "
            "To read or change weights between two steps use 'with trainer.whole_weights() as model:', on every rank; for a moving "
            "average of them trainer.average(decay); to save them trainer.save_pretrained(path) or trainer.state_dict(), and "
            "trainer.load_state_dict() to set them; for outputs trainer.predict(batch), for a loss trainer.evaluate(batch)"
        )


class _Guarded:
    """Comes before the class of a tensor. What it says of itself is for people who look for a fault."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        kinds: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        use = _use(function)
        guarded = [leaf for leaf in pytree.tree_leaves((args, given)) if isinstance(leaf, _Guarded)]
        tensor = next((leaf for leaf in guarded if not _is_up_to_date(leaf)), None)
        if tensor is None and guarded:
            if use in (".grad", ".grad ="):
                _refuse_gradient(_unheld_of(guarded[0]), use, args)
            with torch._C.DisableTorchFunctionSubclass():
                found = function(*args, **given)
                for moves in {unheld.moves for unheld in map(_unheld_of, guarded) if unheld.moves is not None}:
                    moves.written()
                return found
        if tensor is None:
            raise PlanError(f"{use} needs the values of a weight that not every rank holds whole under this plan")
        unheld = _unheld_of(tensor)
        if use in {".device", ".is_cpu", ".is_cuda", "get_device"}:
            return function(torch.empty(0, device=unheld.device))
        if use in _OF_WHOLE:
            args, given = pytree.tree_map_only(_Guarded, lambda leaf: _unheld_of(leaf).whole, (args, given))
            return function(*args, **given)
        if use in (".grad", ".grad =") and _is_without_gradient(unheld, use, args):
            with torch._C.DisableTorchFunctionSubclass():
                return _stand_in(cast(Tensor, tensor), use)
        if (use == "to" and _is_there(unheld, args, given)) or (use == ".data =" and args[1] is tensor):
            return tensor
        if use in _OF_ITSELF or _is_for_optimizer(args, given):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **given)
        if use in ("register_hook", "register_post_accumulate_grad_hook"):
            raise PlanError(refusal_of_hook(unheld.name))
        return unheld.refuse(use)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not _is_up_to_date(self):
            _unheld_of(self).refuse("copy.deepcopy")
        with _ordinary(self) as tensor:
            return copy.deepcopy(tensor, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if not _is_up_to_date(self):
            _unheld_of(self).refuse("a copy or a file of the model (copy, pickle, torch.save)")
        with _ordinary(self) as tensor:
            return tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        unheld = _unheld_of(self)
        if _is_up_to_date(self):
            with _ordinary(self) as tensor:
                return repr(tensor)
        return f"<{unheld.name}: {tuple(unheld.whole.shape)} {unheld.whole.dtype}, {unheld.place}>"

    def __format__(self, form: str) -> str:
        if _is_up_to_date(self):
            with _ordinary(self) as tensor:
                return format(tensor, form)
        if form:
            _unheld_of(self).refuse(f"format {form!r}")
        return repr(self)


def _unheld_of(tensor: object) -> _Unheld:
    return cast(_Unheld, getattr(tensor, _ATTRIBUTE))


def _is_up_to_date(tensor: object) -> bool:
    unheld = _unheld_of(tensor)
    with torch._C.DisableTorchFunctionSubclass():  # it reads such tensors itself
        return unheld.replicated and (unheld.moves is None or not unheld.moves.are_stale())


@contextmanager
def _ordinary(guarded: object) -> Iterator[Tensor]:
    """The tensor is one of its own class while the block runs."""
    tensor, unheld, kind = cast(Tensor, guarded), _unheld_of(guarded), type(guarded)
    tensor.__class__ = cast(type[Tensor], kind.__mro__[2])
    delattr(tensor, _ATTRIBUTE)
    try:
        yield tensor
    finally:
        setattr(tensor, _ATTRIBUTE, unheld)
        tensor.__class__ = cast(type[Tensor], kind)


def _use(function: Callable[..., Any]) -> str:
    """Return the name of what torch was asked for; of an attribute with a point before it."""
    name = getattr(function, "__name__", str(function))
    attribute = getattr(getattr(function, "__self__", None), "__name__", "")
    return {"__get__": f".{attribute}", "__set__": f".{attribute} =", "__delete__": f"del .{attribute}"}.get(name, name)


def _is_without_gradient(unheld: _Unheld, use: str, args: tuple[Any, ...]) -> bool:
    """Return whether the gradient is None for the user too, since it was cleared, is cleared now, or an optimizer passes over it."""
    frame: types.FrameType | None = sys._getframe(2)
    if use == ".grad =" or (frame is not None and frame.f_code is nn.Module.zero_grad.__code__):
        unheld.cleared = unheld.cleared or use == ".grad" or args[1] is None
        return use == ".grad" or args[1] is None
    if unheld.cleared or (frame is not None and frame.f_code is nn.Module._apply.__code__):
        return True
    return not unheld.held and _is_in_optimizer()


def _refuse_gradient(unheld: _Unheld, use: str, args: tuple[Any, ...]) -> None:
    """Raise PlanError if the gradient of a weight that is replicated is read after a step, by none that clears it or updates the weight."""
    code = sys._getframe(2).f_code
    if use == ".grad =" or code is nn.Module.zero_grad.__code__:
        unheld.cleared = unheld.cleared or use == ".grad" or args[1] is None
    elif not unheld.cleared and code is not nn.Module._apply.__code__ and not _is_in_optimizer():
        unheld.refuse(use)


def _stand_in(tensor: Tensor, use: str) -> Tensor | None:
    """Return what an adapter has put in the place of a gradient, to refuse its uses in its own words; None if there is none, or no more."""
    found = tensor.grad
    if type(found) is Tensor or found is None:
        return None
    if use == ".grad =":
        tensor.grad = found = None
    return found


def _is_for_optimizer(args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Return whether a method of an optimizer uses these, all of which this rank holds."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, given)) if isinstance(leaf, _Guarded)]
    return all(_unheld_of(leaf).held for leaf in leaves) and _is_in_optimizer()


def _is_in_optimizer() -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return True
        frame = frame.f_back
    return False


def _is_there(unheld: _Unheld, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Return whether ``to`` asks for the device and type that the tensor has, as ``model.to(device)`` does of a model that is there."""
    try:
        device, dtype, _, form = torch._C._nn._parse_to(*args[1:], **given)
    except (TypeError, RuntimeError):
        return False
    here = device is None or (device.type == unheld.device.type and device.index in (None, unheld.device.index))
    return here and dtype in (None, unheld.whole.dtype) and form is None


@cache
def _guarded_class(kind: type[Tensor]) -> type[Tensor]:
    return cast(type[Tensor], types.new_class(f"Unheld{kind.__name__}", (_Guarded, kind)))


class UnheldWeights:
    """The guards on one rank of the weights that not every rank holds whole.

    Args:
        module: the model as it is on this rank.
        named: the user's name of each.
        optimizer: of this rank, which may use what it updates.
        moves: of an optimizer that may move weights outside of its step; None: it does not.
        replaced: how often the script has put buffers in the place of others, and the runtime what this rank holds of them.
        device: of this process.
    """

    def __init__(
        self,
        module: nn.Module,
        ownership: Ownership,
        placement: Placement,
        named: Callable[[str], str],
        *,
        optimizer: torch.optim.Optimizer,
        moves: OutsideMoves | None,
        replaced: Callable[[], int],
        rank: int,
        device: torch.device,
    ) -> None:
        self._module, self._ownership, self._placement = module, ownership, placement
        self._named, self._moves, self._replaced = named, moves, replaced
        self._optimizer = optimizer
        self._rank, self._device = rank, device
        self._of: list[tuple[str, Tensor, type[Tensor], type[Tensor]]] = []
        self._lifted = 1
        self._there: frozenset[str] = frozenset()
        if moves is not None:
            moves.watch_reads()
        self._find()
        self._guard()

    def _find(self) -> None:
        """Make the guards of the tensors that the module has now; they are lifted."""
        self._found = self._replaced()
        of, rank = self._ownership, self._rank
        places = _places_of_unheld(of, self._placement)
        in_parts = {} if of.apart else dict.fromkeys(of.shards.keys() - places, _IN_PARTS)
        apart = of.shards.keys() if of.apart else ()
        updated = {id(tensor) for group in self._optimizer.param_groups for tensor in group["params"]}
        guarded = {id(tensor): getattr(tensor, _ATTRIBUTE) for _, tensor, _, _ in self._of}
        self._of.clear()
        for name, tensor in stored_tensors(self._module):
            if name not in places and name not in in_parts:
                continue
            whole = torch.empty(of.shapes[name], dtype=tensor.dtype, device="meta")
            held = id(tensor) in updated or (of.holds(rank, name) and not of.box(rank, name) and name not in apart)
            unheld = guarded.get(id(tensor)) or _Unheld(
                name=self._named(name),
                place=(places | in_parts)[name],
                whole=whole,
                device=self._device,
                held=held,
                replicated=name in in_parts,
                moves=self._moves if name in in_parts else None,
            )
            setattr(tensor, _ATTRIBUTE, unheld)
            self._of.append((name, tensor, type(tensor), _guarded_class(type(tensor))))

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """The tensors are as they are for torch while the block runs."""
        self._lift()
        try:
            yield
        finally:
            self._guard()

    def note_step(self) -> None:
        """A step makes gradients, of which there are none here."""
        for _, tensor, _, _ in self._of:
            _unheld_of(tensor).cleared = False

    @contextmanager
    def there(self, names: Collection[str]) -> Iterator[None]:
        """The tensors of these names are whole while the block runs. It begins and ends while guards are lifted."""
        self._there = frozenset(names)
        try:
            yield
        finally:
            self._there = frozenset()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """The user's own code runs while the runtime works: the guards are there again."""
        lifted, self._lifted = self._lifted, 1
        self._guard()
        try:
            yield
        finally:
            self._lift()
            self._lifted = lifted

    def release(self) -> None:
        """Let the tensors be ordinary ones for good."""
        self._lift()
        for _, tensor, _, _ in self._of:
            delattr(tensor, _ATTRIBUTE)
        self._of.clear()

    def _lift(self) -> None:
        if not self._lifted:
            for _, tensor, own, _ in self._of:
                tensor.__class__ = own
        self._lifted += 1

    def _guard(self) -> None:
        self._lifted -= 1
        if not self._lifted:
            if self._found != self._replaced():
                self._find()
            for name, tensor, _, guarded in self._of:
                if name not in self._there:
                    tensor.__class__ = guarded


def _places_of_unheld(ownership: Ownership, placement: Placement) -> dict[str, str]:
    """Return, in words, who holds each parameter and buffer that not every rank holds whole.

    The same on every rank, also on those that hold one: a script that uses it is refused in the same line everywhere.
    """
    if ownership.whole:
        return {}
    everyone = range(len(placement.places))
    found: dict[str, str] = {}
    for name, owners in ownership.owners.items():
        holders = _ranks(owners, placement)
        if ownership.apart and name in ownership.shards:
            keepers = sorted(
                {of for ranges in ownership.shards[name].values() for of, (low, high) in ranges.items() if low < high}
            )
            if keepers:
                found[name] = f"each of {_ranks(keepers, placement)} keeps a range of it ('zero': 3)"
        elif name in ownership.boxes:
            found[name] = f"each of {holders} holds a part of it"
        elif not all(ownership.holds(rank, name) for rank in everyone):
            found[name] = f"{holders} {'holds' if len(owners) == 1 else 'hold'} it"
    return found


def _ranks(ranks: tuple[int, ...] | list[int], placement: Placement) -> str:
    """Return the ranks and their stages in words."""
    stages = sorted({stage for rank in ranks for stage in placement.places[rank].stages})
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    said = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:4]))}{more}"
    return f"{said} ({'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))})" if stages else said
