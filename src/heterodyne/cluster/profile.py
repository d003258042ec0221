"""The Profile: what was measured of a model's blocks on each device, and of the links between the devices.

A measurement keeps its median and its spread (the distance of the quartiles over the median), so that whoever
reads it knows how much to believe. Times are seconds, sizes bytes. What the numbers imply is said in `cost`, not here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from heterodyne.arguments import checked_arguments
from heterodyne.errors import MeasureError
from heterodyne.json_files import EXACT, Count, Seconds, checked, read_json
from heterodyne.text_files import write_text

__all__ = ["WHOLE", "BlockSample", "DeviceProfile", "LinkSample", "Profile"]

PROFILE_VERSION = 10
WHOLE: Final = "*"  # the kind under which the whole model stands among its blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSample:
    """Forward and backward of one block at one micro-batch size.

    ``saved_bytes`` is what the block keeps from forward to backward, but for ``copied_bytes``, the narrow copies of weights that autocast
    makes for each forward, whatever its size; ``spread`` is that of forward plus backward.
    ``peak_bytes`` is the most that forward and backward held at any moment beyond weights and gradients, 0 where the system
    does not say. ``extrapolated``: not measured, but continued from the smaller sizes (out of time or memory, or it is in proportion).
    ``input_s`` and ``weight_s`` are the two halves of a backward that is run in halves, and ``halved_forward_s`` is the forward before
    them, which prepares that; all 0 where that was not measured.
    """

    __pydantic_config__ = EXACT

    micro_batch_size: Annotated[Count, Field(ge=1)]
    forward_s: Seconds
    backward_s: Seconds
    spread: Seconds
    saved_bytes: Count
    peak_bytes: Count = 0
    extrapolated: bool = False
    input_s: Seconds = 0.0
    weight_s: Seconds = 0.0
    halved_forward_s: Seconds = 0.0
    copied_bytes: Count = 0


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """What one device does when all devices compute at the same time.

    Args:
        blocks: samples of each kind of block, by rising micro-batch size. The kind `WHOLE` is the whole model in one piece,
            measured where it fits: it shows what the sum of the blocks leaves out.
        optimizer_s_per_byte: seconds of one optimizer step per byte of trainable parameters.
        host_update_s_per_byte: the same where the optimizer's state is kept by the host: gradients go there, weights come back; 0 where it
            was not measured.
        host_copy_s_per_byte: of copies between the device and pinned memory of its host, in the slower direction; 0 where it was not
            measured.
        step_overhead_s: seconds of a step that belong to no action (reading the batch, bookkeeping).
        overlap: how much slower compute gets while a collective is in flight, as seconds of compute lost per second of
            collective: 0 where it hides completely, 1 where nothing is gained by overlapping. A collective lasts as long as it
            keeps the processor of any of its ranks busy, so it is 1 at most.
        calibration: seconds of a whole share in a trial over what the samples say of it; 1 where nothing was tried.
        context_bytes: what the process occupied of this device's memory before there was a model, 0 where it was not seen.
        precision: that it computed in.
        taken_by_others: the part of its host's cores that others had meanwhile, 0 where there were cores for all.
    """

    __pydantic_config__ = EXACT

    blocks: Mapping[str, tuple[BlockSample, ...]]
    optimizer_s_per_byte: Seconds
    host_update_s_per_byte: Seconds = 0.0
    host_copy_s_per_byte: Seconds = 0.0
    step_overhead_s: Seconds = 0.0
    overlap: Seconds = 0.0
    calibration: Annotated[float, Field(gt=0)] = 1.0
    context_bytes: Count = 0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    taken_by_others: Seconds = 0.0

    def sample_s(self, counts: Mapping[str, int]) -> float:
        """Return the seconds of a sample in so many blocks of each kind, at the sizes in which it takes the least."""
        return sum(
            count * min((s.forward_s + s.backward_s) / s.micro_batch_size for s in self.blocks[kind])
            for kind, count in counts.items()
            if self.blocks.get(kind)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSample:
    """One collective or transfer of ``bytes`` among ``devices``.

    ``send``: from the first to the second. ``exchange``: so many from each to each other one, every few milliseconds while all compute
    in between; waits for who comes late are part of its seconds.
    ``busy_s``: of a ``send``, what it takes of the computing of its first and of its second device, whose processors carry bytes
    themselves; empty where nobody's does.
    """

    __pydantic_config__ = EXACT

    op: Literal["all_reduce", "send", "exchange"]
    devices: tuple[str, ...]
    bytes: Count
    seconds: Seconds
    spread: Seconds
    busy_s: tuple[Seconds, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All measurements of one model on one cluster.

    ``key`` changes when model, devices, torch or dtype change (see `heterodyne.measure`); a profile under another key is not used.
    ``kinds`` says for people what each kind of block is: ``layers.0 (x4)``. ``budget_s``: the seconds that measuring was given, 0 where
    that is not known.
    """

    __pydantic_config__ = EXACT

    key: str
    devices: Mapping[str, DeviceProfile]
    links: tuple[LinkSample, ...] = field(default=())
    kinds: Mapping[str, str] = field(default_factory=dict)
    budget_s: Seconds = 0.0

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """The sizes that were measured on any device, rising."""
        samples = (s for device in self.devices.values() for kind in device.blocks.values() for s in kind)
        return tuple(sorted({s.micro_batch_size for s in samples if not s.extrapolated}))

    def require(self, precisions: Mapping[str, str]) -> None:
        """Raises MeasureError, with their names, if any of these devices were not measured, or in another precision than theirs here."""
        missing = [device for device in precisions if device not in self.devices]
        if missing:
            raise MeasureError(
                f"the profile knows nothing of {', '.join(missing)}; it is of {', '.join(self.devices)}: measure again with "
                "'heterodyne measure', on this cluster"
            )
        for device, precision in precisions.items():
            if (own := self.devices[device].precision) != precision:
                raise MeasureError(
                    f"the profile is of {device} in {own}, and is asked for {precision} by the job or the plan: measure again with "
                    f"'heterodyne measure' and training.precision {precision}"
                )

    def save(self, path: Path) -> None:
        """Write JSON. Raises OSError."""
        write_text(path, json.dumps({"version": PROFILE_VERSION, **asdict(self)}, indent=1))

    @classmethod
    @checked_arguments
    def load(cls, path: Path | str) -> Profile:
        """Read what `save` wrote. Raises MeasureError for anything else."""
        try:
            return cls.from_dict(read_json(path))
        except OSError as error:
            raise MeasureError(f"{path}: the profile cannot be read ({error.strerror})") from error
        except (ValueError, TypeError) as error:
            raise MeasureError(
                f"{path}: not a profile of version {PROFILE_VERSION} ({error}); measure again with 'heterodyne measure'"
            ) from error

    @classmethod
    def from_dict(cls, content: Mapping[str, object]) -> Profile:
        """The inverse of `dataclasses.asdict`, with the version beside it. Raises ValueError or TypeError."""
        fields = dict(content)
        if (version := fields.pop("version", None)) != PROFILE_VERSION:
            raise ValueError(f"its version is {version!r}")
        return checked(cls, fields)
