"""Rows of fp32 numbers as bytes: as they are, rounded to bf16, or as whole numbers of 8 bits with a scale for each block of them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["packed", "unpacked"]

_BLOCK = 256
_LARGEST = 127


def packed(row: Tensor, bits: int) -> bytes:
    """Return a row of fp32 numbers, on the host, as bytes of ``bits`` each (32, 16 or 8)."""
    if bits == 32:
        return _bytes(row)
    if bits == 16:
        return _bytes(row.to(torch.bfloat16))
    blocks = torch.nn.functional.pad(row, (0, -row.numel() % _BLOCK)).view(-1, _BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / _LARGEST
    whole = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-_LARGEST, _LARGEST)
    return _bytes(scales) + _bytes(whole.to(torch.int8).view(-1)[: row.numel()])


def unpacked(data: bytes, size: int, bits: int) -> Tensor:
    """Return the row of ``size`` numbers that these bytes are. Raises ValueError if they are not as many."""
    scales_bytes = -(-size // _BLOCK) * 4 if bits == 8 else 0
    if len(data) != scales_bytes + size * bits // 8:
        raise ValueError(f"{len(data)} bytes for {size} numbers of {bits} bits")
    if not size:
        return torch.empty(0)
    whole = bytearray(data)
    if bits == 32:
        return torch.frombuffer(whole, dtype=torch.float32)
    if bits == 16:
        return torch.frombuffer(whole, dtype=torch.bfloat16).float()
    scales = torch.frombuffer(whole, dtype=torch.float32, count=scales_bytes // 4)
    numbers = torch.frombuffer(whole, dtype=torch.int8, offset=scales_bytes).float()
    return numbers * scales.repeat_interleave(_BLOCK)[:size]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
