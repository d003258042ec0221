"""One kind of traffic of `strangers.py`: sent for some seconds to ports of one address. Prints how many connections it made."""

from __future__ import annotations

import os
import random
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

HTTP = b"GET / HTTP/1.1\r\nHost: store\r\n\r\n"
TLS = b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(range(152))
HUGE = struct.pack("<Q", 2**63) * 8
MOST_HELD = 500


def main() -> None:
    kind, seconds, address = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    if kind.startswith("store"):
        sys.stdout.write("{} {}".format(*stores(sys.argv[4:], address, seconds)))
        sys.stdout.flush()
        os._exit(0)  # torch's client has no end where something else than a store listens
    ports = [int(port) for port in sys.argv[4:]]
    if kind == "greeting":
        sys.stdout.write(" ".join(str(port) for port in ports if greets(address, port)))
        return
    random.seed(0)
    until, sent = time.monotonic() + seconds, 0
    held: list[socket.socket] = []
    while time.monotonic() < until:
        for port in ports:
            with suppress(OSError):
                sent += traffic(kind, address, port, held)
    sys.stdout.write(str(sent))


def traffic(kind: str, address: str, port: int, held: list[socket.socket]) -> int:
    """One round of it. Returns the number of connections. Raises OSError."""
    if kind == "port scan":
        for each in range(max(1, port - 50), port + 50):
            with suppress(OSError):
                socket.create_connection((address, each), timeout=0.2).close()
        return 100
    if kind == "torch client":
        return torch_client(address, port)
    stranger = socket.create_connection((address, port), timeout=1.0)
    if kind in ("half-open", "slow bytes"):
        held.append(stranger)
        if len(held) > MOST_HELD:
            held.pop(0).close()
        for one in held[-20:] if kind == "slow bytes" else ():
            with suppress(OSError):
                one.send(b"x")
        time.sleep(0.005)
        return 1
    with stranger:
        if kind == "replay":  # of the other end's own bytes, twice
            with suppress(TimeoutError):
                greeting = stranger.recv(51)
                stranger.sendall(greeting[-32:] * 2)
                stranger.sendall(stranger.recv(32))
        elif kind != "flood":
            stranger.sendall({"garbage": random.randbytes(4096), "HTTP": HTTP, "huge length": HUGE, "TLS": TLS}[kind])
            time.sleep(0.002)
    return 1


def greets(address: str, port: int) -> bool:
    """Whether a gateway of this library listens there."""
    with suppress(OSError), socket.create_connection((address, port), timeout=0.3) as stranger:
        return stranger.recv(10) == b"heterodyne"
    return False


def torch_client(address: str, port: int) -> int:
    """What a program with torch would do: it sets, deletes, waits for and adds to keys of the run."""
    import torch.distributed as dist

    # torch's own client waits for minutes before a port that does not answer as a store, so its bytes are sent by hand first.
    with socket.create_connection((address, port), timeout=1.0) as stranger:
        stranger.sendall(b"\x09" + struct.pack("<I", 0x3C85F7CE))  # VALIDATE
        for name in (b"heterodyne/0/1/verdict", b"heterodyne/0/1/beat/1"):
            stranger.sendall(b"\x00" + struct.pack("<Q", len(name) + 1) + b"/" + name + struct.pack("<Q", 2) + b"{}")
        stranger.settimeout(0.2)
        with suppress(TimeoutError):
            stranger.recv(64)
    if port == 29400:  # torchrun's own store takes anybody
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
        for times in (1, 2):
            for key in ("verdict", "beat/0", "beat/1", "gateway", "rank/0"):
                store.set(f"heterodyne/0/{times}/{key}", "{}")
                store.delete_key(f"heterodyne/0/{times}/{key}")
        store.add("heterodyne/0/times", 5)
        with suppress(RuntimeError):
            store.get("nothing")
    return 1


def stores(places: list[str], address: str, seconds: float) -> tuple[int, int]:
    """How many places there are, and at how many a store of torch answers."""
    import torch.distributed as dist

    reached = []

    def attack(host: str, port: str) -> None:
        wide = host.strip("[]") in ("", "::", "0.0.0.0", "*")
        with suppress(RuntimeError):
            store = dist.TCPStore(address if wide else host, int(port), is_master=False, wait_for_workers=False)
            reached.append(store.list_keys())

    for place in places:
        host, _, port = place.rpartition(":")
        threading.Thread(target=attack, args=(host, port), daemon=True).start()
    time.sleep(max(5.0, seconds))
    return len(places), len(reached)


if __name__ == "__main__":
    main()
