"""Python objects between ranks: pickled, and signed with a key that only the ranks of the run have.

Reading a pickle can run anything, and the connections between ranks prove nothing about who is at their other end. So the sender, its
place in the order of messages and a digest are signed, and nothing is unpickled before that is verified.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from heterodyne.errors import WorkerError

__all__ = ["Objects"]

T = TypeVar("T")

_HEAD = struct.Struct("<Q32s32s")  # bytes of the pickle, their digest, the signature
_BLOCK = 1024  # bytes that are sent at once: the head, and a pickle that fits behind it
_INLINE = _BLOCK - _HEAD.size


class Objects:
    """Carries objects among the ranks of one process group of host tensors.

    Args:
        group: None: of one rank, which talks to itself.
        key: signs; of a default group that `init_distributed` has made, its `Session.key`. With an empty one anybody can sign.
    """

    def __init__(self, group: dist.ProcessGroup | None, key: bytes) -> None:
        self._group, self._key = group, key
        self._sent = 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks of the group, in order of rank. Raises WorkerError."""
        if self._group is None:
            return [value]
        pickled = pickle.dumps(value)
        self._sent += 1
        blocks = torch.empty(self._group.size(), _BLOCK, dtype=torch.uint8)
        dist.all_gather(list(blocks), self._block(pickled, self._group.rank()), group=self._group)
        heads = [self._opened(block, place) for place, block in enumerate(blocks)]
        rest = max(length for length, _ in heads) - _INLINE
        more: Sequence[Tensor] = [torch.empty(0)] * len(heads)
        if rest > 0:
            more = list(torch.empty(len(heads), rest, dtype=torch.uint8))
            own = torch.zeros(rest, dtype=torch.uint8)
            if len(pickled) > _INLINE:
                own[: len(pickled) - _INLINE] = _tensor(pickled[_INLINE:])
            dist.all_gather(more, own, group=self._group)
        return [self._read(*each) for each in zip(range(len(heads)), heads, blocks, more, strict=True)]

    def broadcast(self, value: T, source: int) -> T:
        """The value of rank ``source`` (a global rank). Raises WorkerError."""
        if self._group is None:
            return value
        place = dist.get_group_rank(self._group, source)
        here = place == self._group.rank()
        pickled = pickle.dumps(value) if here else b""
        self._sent += 1
        block = self._block(pickled, place) if here else torch.empty(_BLOCK, dtype=torch.uint8)
        dist.broadcast(block, src=source, group=self._group)
        head = self._opened(block, place)
        more = torch.empty(0)
        if head[0] > _INLINE:
            more = _tensor(pickled[_INLINE:]) if here else torch.empty(head[0] - _INLINE, dtype=torch.uint8)
            dist.broadcast(more, src=source, group=self._group)
        return value if here else self._read(place, head, block, more)

    def _block(self, pickled: bytes, place: int) -> Tensor:
        digest = hashlib.sha256(pickled).digest()
        head = _HEAD.pack(len(pickled), digest, self._signature(place, len(pickled), digest))
        return _tensor((head + pickled[:_INLINE]).ljust(_BLOCK, b"\0"))

    def _opened(self, block: Tensor, place: int) -> tuple[int, bytes]:
        """How many bytes that rank's pickle has, and their digest; nothing is believed or allocated before they are verified."""
        length, digest, signature = _HEAD.unpack(_bytes(block[: _HEAD.size]))
        if not hmac.compare_digest(signature, self._signature(place, length, digest)):
            raise self._foreign(place)
        return length, digest

    def _read(self, place: int, head: tuple[int, bytes], block: Tensor, more: Tensor) -> Any:
        length, digest = head
        pickled = _bytes(block[_HEAD.size : _HEAD.size + length])
        if length > _INLINE:
            pickled += _bytes(more[: length - _INLINE])
        if not hmac.compare_digest(digest, hashlib.sha256(pickled).digest()):
            raise self._foreign(place)
        return pickle.loads(pickled)

    def _signature(self, place: int, length: int, digest: bytes) -> bytes:
        name = "" if self._group is None else self._group.group_name
        return hmac.digest(self._key, f"{name}\0{self._sent}\0{place}\0{length}\0".encode() + digest, "sha256")

    def _foreign(self, place: int) -> WorkerError:
        rank = place if self._group is None else dist.get_global_rank(self._group, place)
        return WorkerError(
            f"what came on the connection with rank {rank} is not signed with the secret of this run, so it was not read: another program "
            "takes part in the run's connections. Keep the machines of the run in a network of their own, and start it again",
            rank=rank,
        )


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
