"""What messages take of the computing at both ends, of a rank whose partner is not there."""

from __future__ import annotations

import time
from typing import Any

import torch

from heterodyne.measure.links import measure_sends
from heterodyne.measure.sampling import Sampling
from heterodyne.measure.workbench import Workbench
from measure.fake_device import FakeClock

BUSY_S, AWAY_S = 2e-3, 4e-3


class Mail:
    """One end, which computes for a while with each message that it sends, and waits for what comes."""

    rank, world_size = 0, 2

    def barrier(self) -> None:
        return

    def broadcast_object(self, value: Any, source: int) -> Any:
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, value]

    def p2p(self) -> Mail:
        return self

    def connect(self, others: list[int]) -> None:
        return

    def send(self, tensor: torch.Tensor, to: int) -> None:
        until = time.process_time() + BUSY_S
        while time.process_time() < until:
            pass

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Mail:
        time.sleep(AWAY_S)
        return self

    def wait(self) -> torch.Tensor:
        return torch.zeros(1)

    def settle(self) -> None:
        return

    def close(self) -> None:
        return


def test_a_message_takes_of_computing_what_its_processor_does_and_not_what_it_waits() -> None:
    """Half of a round trip, which has one message each way, at the rate at which the rank gets a processor: at most one in one."""
    peers: Any = Mail()
    bench = Workbench(device=torch.device("cpu"), sampling=Sampling(samples=1, sample_s=0.02, section_s=0.05))
    (small, large) = measure_sends(peers, ["a", "b"], bench, message_bytes=(1024, 4096))
    for sample in (small, large):
        assert sample.seconds >= (BUSY_S + AWAY_S) / 2
        assert all(own >= BUSY_S / 2 for own in sample.busy_s)
        assert all(own < sample.seconds for own in sample.busy_s)


def test_devices_that_carry_their_messages_themselves_lose_no_computing_to_them() -> None:
    class Elsewhere(FakeClock):
        """Runs behind the program."""

        def mark(self) -> float:
            return time.perf_counter()

    peers: Any = Mail()
    bench = Workbench(device=torch.device("cpu"), sampling=Sampling(samples=1, sample_s=0.01), clock=Elsewhere())
    samples = measure_sends(peers, ["a", "b"], bench, message_bytes=(1024,))
    assert [s.busy_s for s in samples] == [()]
