"""The accelerator of `accelerator.cpp`: built once a machine, given to a process under a name of its own.

    device = load("vendor_a", devices=2)       # once a process; torch.device("vendor_a:1") is there from now on

Two processes that load it under two names are ranks on the hardware of two vendors. `Accelerator.counts` says what the host
has waited for.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Accelerator", "Counts", "built", "load", "unavailable"]

SOURCE = Path(__file__).with_name("accelerator.cpp")


def unavailable() -> str | None:
    """Why there can be no accelerator here; None: there can."""
    return None if shutil.which("g++") else "the test accelerator needs g++ to be built"


def built() -> Path:
    """The library, from the cache or built now; several processes build it once. Takes a minute on a slow machine."""
    import torch

    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heterodyne-tests"
    library = cache / f"accelerator-{key}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        root = Path(torch.__file__).parent
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / "accelerator.so"
            subprocess.run(
                [
                    *("g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", str(SOURCE), "-o", str(made)),
                    *(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-I{root / 'include'}"),
                    *(f"-I{root / 'include/torch/csrc/api/include'}", f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"),
                ],
                check=True,
            )
            made.rename(library)
    return library


@dataclass(frozen=True)
class Counts:
    """What this process has asked of its devices so far. All but ``kernels`` make the host wait on a GPU."""

    scalar_reads: int
    copies_to_host: int
    copies_to_device: int
    synchronisations: int
    kernels: int

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(mine - its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    @property
    def host_waits(self) -> int:
        """Times that the host had to wait for the device; copies from pageable memory are not among them."""
        return self.scalar_reads + self.copies_to_host + self.synchronisations


@dataclass(frozen=True, kw_only=True)
class Properties:
    name: str
    total_memory: int
    uuid: str


class Accelerator:
    """The loaded library under its name."""

    def __init__(self, name: str, library: ctypes.CDLL, devices: int, memory_bytes: int) -> None:
        self.name = name
        self.devices = devices
        self._library = library
        self._memory_bytes = memory_bytes
        self._callback: Any = None  # what C calls must stay
        self.queues: Any = None  # of its collectives, where there are some

    def counts(self) -> Counts:
        values = (ctypes.c_int64 * 5)()
        self._library.accelerator_counts(values)
        return Counts(*values)

    def limit(self, memory_bytes: int) -> None:
        """The bytes that each device has from now on."""
        self._memory_bytes = memory_bytes
        self._library.accelerator_limit(ctypes.c_int64(memory_bytes))

    def properties(self, index: int) -> Properties:
        uuid = f"{self.name}-{os.getpid()}-{index}"  # another process has other hardware
        return Properties(name=f"Test {self.name}", total_memory=self._memory_bytes, uuid=uuid)

    def on_ticket(self, resolve: Callable[[int], float], done: Callable[[int], bool]) -> None:
        """``resolve(ticket)`` blocks until a ticket is done, says when it was, and raises if it failed; ticket -1: all there are.
        ``done(ticket)`` asks.
        """

        def call(ticket: int) -> float:
            try:
                return resolve(ticket)
            except Exception as error:  # noqa: BLE001  # C++ raises it again
                self._library.accelerator_fail(str(error).encode())
                return -1.0

        self._callback = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64)(call)
        self._asked = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)(lambda ticket: int(done(ticket)))
        self._library.accelerator_on_ticket(self._callback, self._asked)

    def stream_wait(self, index: int, ticket: int) -> None:
        """The current stream goes on only when the ticket is done; the host does not wait."""
        self._library.accelerator_stream_wait(index, ctypes.c_int64(ticket))

    def stream_tickets(self, index: int) -> list[int]:
        """What the current stream waits for."""
        values = (ctypes.c_int64 * 1024)()
        return list(values[: self._library.accelerator_stream_tickets(index, values, len(values))])


def load(name: str, *, devices: int = 1, memory_bytes: int = 2**30) -> Accelerator:
    """Give this process that many devices of the vendor ``name``; once a process, before its first tensor on one."""
    import torch

    library = ctypes.CDLL(str(built()), mode=ctypes.RTLD_GLOBAL)
    library.accelerator_start(devices, ctypes.c_int64(memory_bytes))
    torch.utils.rename_privateuse1_backend(name)
    accelerator = Accelerator(name, library, devices, memory_bytes)
    torch._register_device_module(name, _device_module(name, accelerator, library))
    torch.utils.generate_methods_for_privateuse1_backend()
    # `Module.to` would make a new parameter for each place of a tied one: only kinds that torch knows keep theirs without this.
    torch.__future__.set_swap_module_params_on_conversion(True)
    return accelerator


def _device_module(name: str, accelerator: Accelerator, library: ctypes.CDLL) -> ModuleType:
    """What ``torch.cuda`` is to CUDA, as far as torch and training ask for it."""
    import torch

    def index_of(device: Any = None) -> int:
        if device is None:
            return int(torch.accelerator.current_device_index())
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return int(torch.accelerator.current_device_index()) if found is None else int(found)

    def get_rng_state(device: Any = None) -> torch.Tensor:
        index = index_of(device)
        state = torch.empty(library.accelerator_rng_bytes(index), dtype=torch.uint8)
        library.accelerator_get_rng(index, ctypes.c_void_p(state.data_ptr()))
        return state

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        state = state.contiguous()
        library.accelerator_set_rng(index_of(device), ctypes.c_void_p(state.data_ptr()), ctypes.c_int64(state.numel()))

    def manual_seed_all(seed: int) -> None:
        for index in range(accelerator.devices):
            library.accelerator_seed(index, ctypes.c_int64(seed))

    module = ModuleType(f"torch.{name}")
    module.__dict__.update(
        accelerator=accelerator,
        is_available=lambda: accelerator.devices > 0,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        init=lambda: None,
        device_count=lambda: accelerator.devices,
        current_device=lambda: int(torch.accelerator.current_device_index()),
        set_device=lambda device: torch.accelerator.set_device_index(index_of(device)),
        synchronize=lambda device=None: torch.accelerator.synchronize(index_of(device)),
        get_device_properties=lambda device=None: accelerator.properties(index_of(device)),
        get_device_name=lambda device=None: accelerator.properties(index_of(device)).name,
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        manual_seed=lambda seed: library.accelerator_seed(index_of(), ctypes.c_int64(seed)),
        manual_seed_all=manual_seed_all,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        memory_allocated=lambda device=None: torch.accelerator.memory_allocated(index_of(device)),
        max_memory_allocated=lambda device=None: torch.accelerator.max_memory_allocated(index_of(device)),
        reset_peak_memory_stats=lambda device=None: torch.accelerator.reset_peak_memory_stats(index_of(device)),
        empty_cache=lambda: None,
        Stream=torch.Stream,
        Event=torch.Event,
    )
    return module
