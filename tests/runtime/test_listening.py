"""The store listens only at the address of the workers."""

from __future__ import annotations

import socket

import pytest

from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from heterodyne.runtime.rendezvous.store import open_store
from heterodyne.runtime.rendezvous.store_port import listening_socket


def test_a_store_on_loopback_refuses_the_other_addresses_of_the_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = WorkerEnvironment(
        rank=0, world_size=1, local_rank=0, local_world_size=1, master_address="127.0.0.1", master_port=port,
        secret="the secret of this run",
    )  # fmt: skip
    with open_store(environment, timeout_s=10) as opened:
        opened.store.set("key", "value")
        assert opened.store.get("key") == b"value"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)


def test_an_address_of_another_machine_is_said_and_not_bound() -> None:
    said: list[str] = []
    assert listening_socket("192.0.2.1", 29_511, one_machine=False, say=said.append) is None
    assert len(said) == 1
    assert "192.0.2.1" in said[0]


def test_a_name_that_means_loopback_is_bound_only_if_all_workers_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert listening_socket("head", 0, one_machine=False, say=lambda _: None) is None
    bound = listening_socket("head", 0, one_machine=True, say=lambda _: None)
    assert bound is not None
    with bound:
        assert bound.getsockname()[0] == "127.0.1.1"
