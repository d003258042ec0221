"""What a module keeps from one call to the next, beside its buffers: the hidden state of a stream, a slow average, weights set anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

__all__ = ["changed_names", "kept_tensors"]


def kept_tensors(module: nn.Module) -> Mapping[str, Tensor]:
    """The tensors that its modules hold as plain attributes, or in tuples, lists and dicts there, by the path of the attribute."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, part in module.named_modules()
        for attribute, value in vars(part).items()
        if attribute not in ("_parameters", "_buffers", "_modules")
        for name, tensor in _tensors(attribute, value)
    }


def changed_names(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """The attributes, or parts of them, that hold another tensor than before."""
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
