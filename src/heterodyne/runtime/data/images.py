"""A directory of images, one folder a class, as a map-style dataset. Pillow reads them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heterodyne.errors import DataError
from heterodyne.text_files import open_regular

__all__ = ["ImageFolder"]

_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageFolder:
    """A sample has ``pixel_values``, float [3, size, size] in -1 to 1, and ``labels``, the number of its folder by name.

    Raises DataError, when it is first read, for a directory without folders of images.
    """

    directory: Path
    size: int

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the folders, in order of their labels."""
        if not self.directory.is_dir():
            raise DataError(f"data.images: there is no directory {self.directory}; correct the path")
        found = sorted(path.name for path in self.directory.iterdir() if path.is_dir() and path.name[0] != ".")
        if not found:
            raise DataError(f"data.images: {self.directory} has no folders; put the images of each class into one")
        return tuple(found)

    @cached_property
    def files(self) -> tuple[tuple[Path, int], ...]:
        """Every image with its label, by rising path."""
        found = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((self.directory / name).rglob("*"))
            if path.suffix.lower() in _SUFFIXES
        ]
        if not found:
            raise DataError(
                f"data.images: the folders of {self.directory} have no images ({', '.join(sorted(_SUFFIXES))})"
            )
        return tuple(found)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        path, label = self.files[index]
        pillow = _pillow()
        try:
            with open_regular(path) as file, pillow.open(file) as image:
                sized = image.convert("RGB").resize((self.size, self.size))
        except OSError as error:  # also what is no image, or is cut short
            raise DataError(f"data.images: {path} cannot be read as an image: {error}") from error
        pixels = torch.from_numpy(np.array(sized)).permute(2, 0, 1).float()
        return {"pixel_values": pixels / 127.5 - 1, "labels": torch.tensor(label)}


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise DataError("data.images needs Pillow; install it with pip install pillow") from error
