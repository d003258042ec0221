"""Who does not know the secret of a run does not reach its store, and what it writes beside is not believed."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs do not declare it

from heterodyne.errors import WorkerError
from heterodyne.runtime.liveness.signing import SignedStore
from heterodyne.runtime.rendezvous import gateway, store_port
from heterodyne.runtime.rendezvous import store as stores
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from heterodyne.runtime.rendezvous.gateway import Gateway, Tunnel
from heterodyne.runtime.rendezvous.run_secret import GREETING, HandshakeError, SecretError, mac
from heterodyne.runtime.rendezvous.store import RunStore, kept_store, open_store
from heterodyne.runtime.rendezvous.store_port import LOOPBACK, StorePort

SECRET = b"the secret of this run"
RANK = bytes([0, 0, 0, 1])
TIMEOUT = timedelta(seconds=60)  # only a fault takes so long


class Place:
    """A store behind a gateway on this machine. ``said``: the lines about strangers."""

    def __init__(self, store: TCPStore, port: StorePort) -> None:
        self.said: list[str] = []
        self.store = store
        bound = socket.socket()
        bound.bind((LOOPBACK, 0))
        self.gateway = Gateway(bound, secret=SECRET, store=port, say=self.said.append)

    def tunnel(self, secret: bytes = SECRET) -> Tunnel:
        return Tunnel(LOOPBACK, self.gateway.port, secret=secret, rank=1)

    def stranger(self) -> socket.socket:
        return socket.create_connection((LOOPBACK, self.gateway.port), timeout=60)

    def serves(self) -> bool:
        """Whether a worker gets through, with a value of its own."""
        with closing(self.tunnel()) as tunnel:
            client = TCPStore(LOOPBACK, tunnel.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
            count = client.add("served", 1)
            return client.clone().get("served") == str(count).encode()


@pytest.fixture
def place() -> Iterator[Place]:
    with kept_store(TIMEOUT) as kept, closing((made := Place(*kept)).gateway):
        yield made


def ended(stranger: socket.socket) -> bytes:
    """All that it is sent until the gateway closes."""
    received = b""
    try:
        while block := stranger.recv(4096):
            received += block
    except ConnectionResetError:
        pass
    return received


def test_who_knows_the_secret_has_the_store(place: Place) -> None:
    with closing(place.tunnel()) as tunnel:
        tunnel.knock()
        client = TCPStore(LOOPBACK, tunnel.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        client.set("large", "x" * 3_000_000)
        assert place.store.get("large") == b"x" * 3_000_000
        with ThreadPoolExecutor() as pool:  # a get that waits does not stop the others
            waiting = pool.submit(client.clone().get, "late")
            client.set("late", "came")
            assert waiting.result(60) == b"came"
    assert not place.gateway.strangers
    assert not place.said


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\0" * 4096,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        struct.pack("<Q", 2**63) * 8,
        b"\x0c"
        + struct.pack("<I", 0x3C85F7CE)
        + b"\x00"
        + struct.pack("<Q", 7)
        + b"failure"
        + struct.pack("<Q", 2)
        + b"{}",
    ],
    ids=["nothing", "zeros", "HTTP", "TLS", "huge length", "store client"],
)
def test_other_traffic_is_counted_and_closed(place: Place, said: bytes) -> None:
    with place.stranger() as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        assert len(ended(stranger)) == len(GREETING) + 32, "it learns 32 random bytes"
    assert place.serves()
    assert place.gateway.strangers == {LOOPBACK: 1}
    assert len(place.said) == 1
    assert LOOPBACK in place.said[0]
    assert place.store.num_keys() <= 2, "what it wrote is in no store"


def test_half_open_connections_and_floods_keep_nobody_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_HANDSHAKE_S", 1.0)
    held = [place.stranger() for _ in range(100)]
    assert place.serves()
    for stranger in held:
        with stranger:
            ended(stranger)  # or the socket's own timeout says that it is kept
    assert len(place.said) == 1


def test_an_answer_cannot_be_sent_back_or_used_again(place: Place) -> None:
    with place.stranger() as first:
        greeting = first.recv(len(GREETING) + 32, socket.MSG_WAITALL)
        sent = greeting[-32:] + RANK
        first.sendall(sent + mac(SECRET, b"client", greeting[-32:], sent)[::-1])
        assert ended(first) == b""
    with place.stranger() as first:
        server = first.recv(len(GREETING) + 32, socket.MSG_WAITALL)[-32:]
        sent = bytes(32) + RANK
        answer = sent + mac(SECRET, b"client", server, sent)
        first.sendall(answer)
        proof = first.recv(32, socket.MSG_WAITALL)
        assert proof == mac(SECRET, b"server", server, sent)
    for replayed in (answer, sent + proof):
        with place.stranger() as second:
            second.recv(len(GREETING) + 32, socket.MSG_WAITALL)
            second.sendall(replayed)
            assert ended(second) == b""


def test_a_gateway_without_the_secret_is_not_believed(place: Place) -> None:
    with closing(place.tunnel(b"the secret of another run")) as tunnel, pytest.raises(SecretError):
        tunnel.knock()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + bytes(32))
        await reader.readexactly(68)
        writer.write(bytes(32))
        writer.close()

    async def against(server: asyncio.Server) -> None:
        port = server.sockets[0].getsockname()[1]
        with closing(Tunnel(LOOPBACK, port, secret=SECRET, rank=1)) as tunnel:
            await asyncio.to_thread(tunnel.knock)

    async def run() -> None:
        async with await asyncio.start_server(impostor, LOOPBACK, 0) as server:
            await against(server)

    with pytest.raises(HandshakeError, match="another secret"):
        asyncio.run(run())


def test_a_forged_or_moved_entry_is_no_entry() -> None:
    plain = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    signed, other = (SignedStore(plain, key, timeout_s=1) for key in (SECRET, b"another"))
    plain.set("failure", "rank 1 died")
    assert signed.get("failure") is None
    assert signed.set_first("failure", "rank 2 died") == "rank 2 died"
    assert signed.set_first("failure", "rank 3 died") == "rank 2 died"
    assert other.get("failure") is None
    plain.set("heartbeat", plain.get("failure"))
    assert signed.get_all(["heartbeat", "failure", "nothing"]) == [None, "rank 2 died", None]
    assert signed.forged == 3


def meeting(environment: WorkerEnvironment, number: int) -> tuple[str, str]:
    """What one worker reads of the other one in two meetings, one after the other."""
    read = []
    for turn in range(2):
        with open_store(environment, timeout_s=20) as opened:
            mine, theirs = f"{number}/{turn}", f"{1 - number}/{turn}"
            opened.signed(timeout_s=20).set(f"from {number}", mine)
            opened.store.set(f"ready {number}", "")
            opened.store.get(f"ready {1 - number}")
            assert opened.signed(timeout_s=20).get(f"from {1 - number}") == theirs
            read.append(theirs)
            opened.store.set(f"done {number}", "")
            if number == 0:  # it leaves last
                opened.store.get("done 1")
            opened.wait_until_closed()
    return read[0], read[1]


@pytest.mark.parametrize("hosted", [True, False], ids=["torchrun", "own launcher"])
def test_meetings_follow_each_other_behind_a_gateway(hosted: bool, capfd: pytest.CaptureFixture[str]) -> None:
    agent = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False) if hosted else None
    if agent is None:
        with socket.create_server((LOOPBACK, 0)) as free:
            port = free.getsockname()[1]
    else:
        port = agent.port
    given = WorkerEnvironment(
        rank=0, world_size=2, local_rank=0, local_world_size=2, master_address=LOOPBACK, master_port=port,
        store_is_hosted=hosted, secret=SECRET.decode(),
    )  # fmt: skip
    with ThreadPoolExecutor() as pool:
        other = pool.submit(meeting, replace(given, rank=1, local_rank=1), 1)
        assert meeting(given, 0) == ("1/0", "1/1")
        assert other.result(30) == ("0/0", "0/1")
    assert "did not show the secret" not in capfd.readouterr().err


def test_workers_with_different_secrets_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_ANSWER_S", 0.2)
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    given = WorkerEnvironment(
        rank=0, world_size=2, local_rank=0, local_world_size=2, master_address=LOOPBACK, master_port=port,
        secret=SECRET.decode(),
    )  # fmt: skip
    said: list[str] = []
    with open_store(given, timeout_s=10, say=said.append) as opened:
        assert isinstance(opened, RunStore)
        with (
            pytest.raises(
                WorkerError, match=r"rank 1 on .* is not let in .* different values of HETERODYNE_RUN_SECRET"
            ),
            open_store(replace(given, rank=1, local_rank=1, secret="another secret altogether"), timeout_s=10),
        ):
            pass
    assert len(said) == 1


def test_behind_the_store_of_torchrun_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_ANSWER_S", 0.2)
    agent = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    given = WorkerEnvironment(
        rank=0, world_size=2, local_rank=0, local_world_size=2, master_address=LOOPBACK, master_port=agent.port,
        store_is_hosted=True, secret=SECRET.decode(),
    )  # fmt: skip
    monkeypatch.setattr(stores, "secret_of_user", lambda: "the secret of a user")
    with (
        open_store(given, timeout_s=10),
        pytest.raises(WorkerError, match=r"rank 1 on .* is not let in .* this worker has no HETERODYNE_RUN_SECRET, so"),
        open_store(replace(given, rank=1, local_rank=1, secret=""), timeout_s=10),
    ):
        pass


def test_the_port_of_the_store_is_for_its_gateway_where_the_kernel_has_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    with kept_store(TIMEOUT) as (_, port):
        assert port.guarded
        with pytest.raises(TimeoutError):
            socket.create_connection((LOOPBACK, port.number), timeout=0.3)
    monkeypatch.setattr(store_port, "_ATTACH_FILTER", 9999)
    with kept_store(TIMEOUT) as (store, port), closing((place := Place(store, port)).gateway):
        assert not port.guarded
        assert place.serves()
