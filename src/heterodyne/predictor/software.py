"""What a framework does besides the mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from heterodyne.documents import Section, read_yaml, validate
from heterodyne.errors import ClusterError

__all__ = ["Software", "framework_names", "is_known", "software_of"]


@dataclass(frozen=True, kw_only=True)
class Software:
    """How devices are driven. The defaults are PyTorch's of today.

    Args:
        tuned: made for its devices by those who make them, or by hand.
        flash: attention in one kernel that never writes the scores. ``attention``: which: FlashAttention's first version, its second, or
            cuDNN's, which from Hopper on does what FlashAttention-3 and -4 do.
        rowwise: whether 8 bits have a scale for each row of an operand; else one for all of it.
        fused: norms, activations and dropouts in few kernels; else each op reads and writes memory for itself. ``fused_loss``: the same
            of softmax and cross entropy. ``loss_in_place``: they and the gradient of the logits are one kernel that writes over the logits.
        launch: how much of the host's time for starting kernels counts: 1 for eager PyTorch, near 0 for captured graphs and compiled
            programs.
        stops_early: whether computing a layer again ends where the last tensor that its backward needs is there; what the layer's last
            product would give is not.
        overlap_gradients, overlap_parameters: whether gradients are reduced, and sharded parameters gathered, beside the computing.
        keeps_gathered: whether in a pipeline ZeRO-3 gathers parameters once a step, and keeps them and whole gradients until the last
            micro-batch; else both come and go with each.
        gathers: how many messages the parameters of a layer are gathered in (ZeRO-3).
        overlap_tensor: the part of tensor-parallel traffic that hides behind matrix products, of a forward and of a backward.
        overlap_sends: whether a device computes while it sends to the next stage; else it waits until that has what it sends.
        duplex: whether, where sends do not overlap, what goes to a neighbour and what comes from it are under way at once.
        scatters_sends: whether tensor-parallel neighbours, who all have what crosses between stages, send a part of it each and gather it
            where it arrives.
        sends_once: whether a token goes to a node, and to a device, once for all of its experts there; else once for each of its experts.
        gradient_bytes: of an element of a gradient, as it is kept and reduced.
        optimizer_bytes: read and written in a step of the optimizer, a parameter: Adam with fp32 masters reads gradient, master and two
            moments and writes master, moments and weight.
        state_bytes: kept by the optimizer, a parameter: masters and moments.
        buffer_bytes: that communication keeps for itself.
        state_group: among how many replicas ZeRO-1 shares the state of the optimizer, each such group having all of it; 0: among all.
        keeps_outputs: whether a stage keeps what it has sent on until its backward; else only the graph behind it stays.
        fp16: whether a device without units for bf16 trains in fp16 instead; else its matrix products run at the rate of fp32.
        broadcasts: whether updated parameters come back in a message from each owner in turn, not in one gather.
        combined: whether the collectives of all layers are one: gradients wait for it whole, however they are sharded, and with ZeRO-3
            all parameters are gathered at a time.
    """

    tuned: bool = False
    flash: bool = True
    attention: Literal["flash1", "flash2", "cudnn"] = "flash2"
    fused: bool = True
    fused_loss: bool = True
    loss_in_place: bool = False
    launch: float = 1.0
    stops_early: bool = False
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    keeps_gathered: bool = False
    gathers: int = 1
    overlap_tensor: tuple[float, float] = (0.0, 0.0)
    overlap_sends: bool = True
    duplex: bool = True
    scatters_sends: bool = False
    sends_once: bool = False
    gradient_bytes: int = 4
    optimizer_bytes: int = 30
    state_bytes: int = 12
    buffer_bytes: int = 0
    state_group: int = 0
    keeps_outputs: bool = False
    fp16: bool = True
    rowwise: bool = False
    broadcasts: bool = False
    combined: bool = False


class _Entry(Section):
    names: tuple[str, ...]
    set: Mapping[str, bool | float | str | tuple[float, float]]
    why: str


class _Entries(Section):
    entries: tuple[_Entry, ...]


@cache
def _entries() -> tuple[_Entry, ...]:
    path = Path(str(files("heterodyne.predictor") / "software.yaml"))
    content, lines = read_yaml(path, ClusterError)
    return validate(_Entries, {"entries": content}, error=ClusterError, path=str(path), lines=lines).entries


def framework_names() -> tuple[str, ...]:
    """The words by which `software_of` knows a framework."""
    return tuple(name for entry in _entries() for name in entry.names)


def is_known(framework: str) -> bool:
    """Whether anything is known of a framework; else `software_of` takes it for PyTorch of today, and who asks should say so."""
    return any(word in framework.lower() for word in framework_names())


def software_of(framework: str | None) -> Software:
    """What is known of a framework by its name; PyTorch of today where nothing is."""
    name = (framework or "").lower()
    found = next((entry for entry in _entries() if any(word in name for word in entry.names)), None)
    if found is None:
        return Software()
    whole = {"gathers", "gradient_bytes", "optimizer_bytes", "state_bytes", "buffer_bytes", "state_group"}
    return replace(Software(), **{key: int(value) if key in whole else value for key, value in found.set.items()})  # type: ignore[arg-type]
