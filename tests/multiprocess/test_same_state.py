"""Ranks that run other code, or write elsewhere, are found before anything is trained, on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from heterodyne.code_read import digest_of_code
from heterodyne.errors import WorkerError
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.same_ranks import require_same_code
from multiprocess.pool import Pool, World


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Tripled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3


Tripled.__qualname__ = "Scaled"  # a class of one name, as another state of its file has it


def other_code(world: World) -> str:
    communicator = Communicator(rank=world.rank, world_size=world.world_size, device=torch.device("cpu"))
    require_same_code(communicator, digest_of_code(Scaled()), "the code of the model")
    with pytest.raises(WorkerError) as refused:
        require_same_code(communicator, digest_of_code((Scaled, Tripled)[world.rank]()), "the code of the model Scaled")
    return str(refused.value)


def test_another_state_of_the_code_is_named_with_rank_and_host(pool: Pool) -> None:
    for told in pool.run(2, other_code):
        assert "the code of the model Scaled is another on rank 1 (host " in told
        for kind in (Scaled, Tripled):
            assert digest_of_code(kind())[:12] in told
        assert "bring all hosts to one state" in told
