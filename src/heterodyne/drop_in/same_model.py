"""Whether all ranks have the same model, said by name before PyTorch compares shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from torch import Tensor, nn

from heterodyne.errors import HeterodyneError, WorkerError
from heterodyne.runtime.comm.communicator import Communicator

__all__ = ["compared", "require_same_model"]

_SHOWN = 4


def compared(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, without those that the model keeps out of DDP."""
    left_out = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    every: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor for name, tensor in every.items() if name not in left_out}


def require_same_model(communicator: Communicator, module: nn.Module) -> None:
    """Raise WorkerError on every rank if parameters or buffers differ in name, shape, dtype or in whether they are trained. Collective."""
    unmade = next((name for name, p in compared(module).items() if nn.parameter.is_lazy(p)), None)
    if unmade is not None:
        raise HeterodyneError(
            f"{unmade!r} has no shape before the first forward: run one (a dry run) before the model is wrapped"
        )
    own = [_line(name, tensor) for name, tensor in compared(module).items()]
    of_ranks = communicator.all_gather_object(own)
    wrong = [
        f"rank {rank} has {theirs or 'nothing'} where rank 0 has {first or 'nothing'}"
        for rank, lines in enumerate(of_ranks)
        for first, theirs in _different(of_ranks[0], lines)
    ]
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise WorkerError(
            "\n  ".join(["the ranks have different models; build the same one on every rank:", *wrong[:_SHOWN], *more])
        )


def _line(name: str, tensor: Tensor) -> str:
    kind = (
        "buffer"
        if not isinstance(tensor, nn.Parameter)
        else "trained parameter"
        if tensor.requires_grad
        else "frozen parameter"
    )
    return f"{kind} {name!r} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _different(first: Sequence[str], theirs: Sequence[str]) -> list[tuple[str, str]]:
    return [(a, b) for a, b in zip_longest(first, theirs, fillvalue="") if a != b]
