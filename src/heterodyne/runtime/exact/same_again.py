"""Does a second call of a module on the same samples give the same? The parts of a batch are as many calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

__all__ = ["MOST_NAMES", "changed_names", "kept_tensors", "words_of_second_call"]

MOST_NAMES = 3


def words_of_second_call(model: str, *, first: float, again: float, names: list[str]) -> str:
    """Say that a second call gave another loss or other gradients; ``names``: the attributes that it set (`changed_names`)."""
    where = f" It sets {', '.join(map(repr, names[:MOST_NAMES]))} in forward." if names else ""
    return (
        f"the loss of {model} is {again:.7g} in a second call on the same samples, and was {first:.7g} in the first: it, or the loss "
        f"function, keeps something from one call to the next.{where} Each device calls it for its own parts of a batch, so the copies "
        "would drift apart. Pass what the next call needs as an input of the batch, or change it outside of forward, once a step"
    )


def kept_tensors(module: nn.Module) -> Mapping[str, Tensor]:
    """Return the tensors that its modules hold as plain attributes, or in tuples, lists and dicts there, by the path of the attribute.

    Such are the hidden state of a stream, a slow average, weights set again.
    """
    return {
        f"{path}.{name}" if path else name: tensor
        for path, part in module.named_modules()
        for attribute, value in vars(part).items()
        if attribute not in ("_parameters", "_buffers", "_modules")
        for name, tensor in _tensors(attribute, value)
    }


def changed_names(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """Return the attributes, or parts of them, that hold another tensor than before."""
    return [name for name, tensor in after.items() if before.get(name) is not tensor]


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for place, entry in enumerate(value):
            yield from _tensors(f"{name}[{place}]", entry)
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _tensors(f"{name}[{key!r}]", entry)
