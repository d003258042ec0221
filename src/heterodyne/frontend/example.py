"""The example batch: which inputs follow the batch, and a stand-in for it that holds no data."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from heterodyne.errors import CaptureError

__all__ = ["Batch", "Example", "positional_names", "read_example", "sizes_of", "trace_sizes"]

Batch = Mapping[str, Tensor] | Sequence[Tensor]

# The batch size during the trace is one that no layer has as a width: a comparison of the two would pass by chance, and
# the trace would then hold for this batch size alone. Primes also keep a product of other sizes from coinciding with it.
_UNLIKELY_SIZES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)


@dataclass(frozen=True, kw_only=True)
class Example:
    """The inputs in the order of the call; ``follows`` says which of them have the batch as dim 0.

    ``names`` are keywords if ``keywords``, else what forward calls its positional arguments.
    """

    names: tuple[str, ...]
    keywords: bool
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    follows: tuple[bool, ...]
    batch: int

    def fake(self, mode: FakeTensorMode, batch: int) -> tuple[Tensor, ...]:
        """Tensors without data, for a batch of that size."""
        with mode:
            return tuple(
                torch.empty((batch, *shape[1:]) if follows else shape, dtype=dtype, device="cpu")
                for shape, dtype, follows in zip(self.shapes, self.dtypes, self.follows, strict=True)
            )

    def values(self, batch: Batch) -> tuple[Tensor, ...]:
        """The tensors of a real batch in the order of `names`. Raises CaptureError if one is missing."""
        if isinstance(batch, Mapping):
            missing = [name for name in self.names if name not in batch]
            if missing:
                raise CaptureError(
                    f"the batch has no {', '.join(missing)}; the model was captured with {', '.join(self.names)}"
                )
            return tuple(batch[name] for name in self.names)
        if len(batch) != len(self.names):
            raise CaptureError(
                f"the batch has {len(batch)} tensors; the model was captured with {len(self.names)}: {', '.join(self.names)}"
            )
        return tuple(batch)

    @property
    def shared(self) -> tuple[str, ...]:
        """The inputs that all samples share."""
        return tuple(name for name, follows in zip(self.names, self.follows, strict=True) if not follows)

    def sharing(self) -> tuple[Example, ...]:
        """Return this example with one input fewer that follows the batch, for each that all samples might share; square ones first."""
        found = [place for place, follows in enumerate(self.follows) if follows][1:]
        found.sort(key=lambda place: (len(set(self.shapes[place])) > 1, len(self.shapes[place])))
        return tuple(
            replace(self, follows=tuple(follows and at != place for at, follows in enumerate(self.follows)))
            for place in found
        )

    def size_of(self, batch: Batch) -> int:
        """The number of samples of a real batch."""
        first = self.follows.index(True)
        return int(self.values(batch)[first].shape[0])


def read_example(model: nn.Module, batch: Batch, shared: Collection[str] = ()) -> Example:
    """Check the example and find its batch dimension.

    The batch is dim 0, and its size that of most inputs; inputs of another size there do not follow it. Raises CaptureError
    for anything but tensors, and where no size is that of most.

    Args:
        shared: inputs that do not follow the batch, whatever their sizes.
    """
    keywords = isinstance(batch, Mapping)
    if not keywords and not isinstance(batch, tuple | list):
        raise CaptureError(f"the example batch is a {type(batch).__name__}; it is a mapping or a tuple of tensors")
    names = tuple(map(str, batch)) if keywords else positional_names(model, len(batch))
    values = tuple(batch.values()) if isinstance(batch, Mapping) else tuple(batch)
    if not values:
        raise CaptureError("the example batch is empty; pass the tensors that the model is called with")
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, Tensor):
            raise CaptureError(
                f"the input {name!r} is {value!r}, a {type(value).__name__}; every input of a batch is a tensor. "
                "Leave it out, or give it to the model when it is built."
            )
    unknown = [name for name in shared if name not in names]
    if unknown:
        raise CaptureError(f"shared names {', '.join(unknown)}, and the inputs are {', '.join(names)}")
    size = _batch_size({name: value for name, value in zip(names, values, strict=True) if name not in shared})
    for name, value in zip(names, values, strict=True):
        if not value.numel():
            raise CaptureError(
                f"the input {name!r} of the example batch is {list(value.shape)}, so its samples are empty: give samples that hold "
                "something, or leave that input out"
            )
    return Example(
        names=names,
        keywords=keywords,
        shapes=tuple(tuple(value.shape) for value in values),
        dtypes=tuple(value.dtype for value in values),
        follows=tuple(
            name not in shared and value.dim() > 0 and value.shape[0] == size
            for name, value in zip(names, values, strict=True)
        ),
        batch=size,
    )


def sizes_of(example: Example, model: nn.Module) -> set[int]:
    """Return the sizes of all dims of the inputs and the parameters."""
    return {size for shape in example.shapes for size in shape} | {s for p in model.parameters() for s in p.shape}


def trace_sizes(example: Example, model: nn.Module) -> tuple[int, ...]:
    """Batch sizes to trace with, the best one first; the example's own comes last."""
    taken = sizes_of(example, model)
    unlikely = next((size for size in _UNLIKELY_SIZES if size not in taken), 59)
    return (unlikely, example.batch) if example.batch > 1 else (unlikely,)


def _batch_size(values: Mapping[str, Tensor]) -> int:
    """The size of dim 0 that most of the inputs have. Raises CaptureError if there is no such."""
    sizes = Counter(value.shape[0] for value in values.values() if value.dim() > 0)
    # A leading 1 is for broadcasting, unless every input has it.
    several = Counter({size: count for size, count in sizes.items() if size != 1}) or sizes
    ranked = several.most_common(2)
    if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in values.items())
        raise CaptureError(
            f"the inputs have no common batch dimension: {shapes}. Dim 0 is the batch; let the inputs agree on its size, and "
            "name those that all samples share, as in shared=('mask',), or keep them as buffers of the model."
        )
    if ranked[0][0] == 0:
        raise CaptureError("the example batch has no samples; pass at least one")
    return ranked[0][0]


def positional_names(model: nn.Module, count: int) -> tuple[str, ...]:
    """Return what forward calls its first ``count`` positional arguments; ``input_N`` beyond those that have a name."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
    return tuple(names[i] if i < len(names) else f"input_{i}" for i in range(count))
