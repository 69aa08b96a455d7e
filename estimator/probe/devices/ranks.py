"""Run a function once per device, each in a fresh process pinned to that device's cores.

Importing torch takes a second or two. The server imports it and does nothing else: no tensor, no
thread, no process group; a rank forked from it behaves as a newly started process would.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from estimator import errors
from estimator.errors import EstimatorError, ProbeError, cause
from estimator.machines.profile import Device
from estimator.probe.devices.inventory import pinned

_connection: Connection | None = None


def report(value: Any) -> None:
    """Send a partial result (JSON values) from inside a rank to the `on_report` of its run."""
    if _connection is not None:
        _send(_connection, {"report": value})


def _send(link: Connection, message: Any) -> None:
    """One message of the conversation between a rank and whoever asked for it: JSON values."""
    link.send_bytes(json.dumps(message).encode())


def _received(link: Connection) -> Any:
    """The next message; None where there is no other."""
    try:
        return json.loads(link.recv_bytes())
    except (EOFError, ConnectionResetError):
        return None


def serve(control_number: int) -> None:
    """Fork a rank for every two descriptors received, after the modules named before are here."""
    control = Connection(control_number)
    # Asking the CUDA runtime for its devices, as some modules do when imported, would keep every
    # forked rank from using them; asking NVML does not (torch.cuda.is_available, "fork poisoning").
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Nobody waits for ranks: the system buries them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while (modules := _received(control)) is not None:
        descriptors = recv_handle(control), recv_handle(control)
        for module in modules:
            # A rank that cannot do without says so itself.
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        child = os.fork()
        if child == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _be_rank(*descriptors)
        _send(control, child)
        for descriptor in descriptors:
            os.close(descriptor)
    # Tearing down what was imported takes seconds, and whoever asked waits for this process.
    os._exit(0)


@contextlib.contextmanager
def _last_words(link: Connection) -> Iterator[None]:
    """Carries whatever ends a rank to the process that asked for it, then ends the rank."""
    try:
        yield
    finally:
        error = sys.exception()
        if error is not None:
            text = " ".join(str(error).split())[:400] or "no message"
            with contextlib.suppress(OSError):
                _send(link, {"error": type(error).__name__, "text": text})
        os._exit(0 if error is None else 1)


def _be_rank(link_number: int, log: int) -> None:
    """The whole life of a forked process."""
    global _connection
    link = _connection = Connection(link_number)
    with _last_words(link):
        _die_with_parent()
        os.dup2(log, 1)
        os.dup2(log, 2)
        if (place := _received(link)) is None:
            return
        sys.path[:] = place["path"]
        os.chdir(place["folder"])
        # Without cores (accelerators) one thread, as torchrun sets it for its workers.
        threads = max(1, len(place["cores"]))
        with pinned(place["cores"], threads=threads), _world_of(place):
            # One call after the other, until there are no more.
            while (call := _received(link)) is not None:
                module, _, name = call["function"].partition(":")
                function = getattr(importlib.import_module(module), name)
                result = function(place["rank"], place["world_size"], call["arguments"])
                _send(link, {"result": result})


def _die_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        # PR_SET_PDEATHSIG (prctl(2)): a rank does not outlive the server, however that ends.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@contextlib.contextmanager
def process_group(
    kind: str, store: Any, *, rank: int, world_size: int, timeout_s: float
) -> Iterator[None]:
    """A torch.distributed world of such devices around the block; after an error it stays."""
    import torch
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    on_cuda = kind == "cuda"
    # Gloo otherwise looks up the host's own name, which fails on machines without a name service.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=max(1.0, timeout_s)),
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_cuda else None,
    )
    yield
    dist.destroy_process_group()


def _world_of(place: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """The world of a rank that is to have one; its device is the current one."""
    import torch
    import torch.distributed as torch_distributed

    if place["kind"] == "cuda":
        torch.cuda.set_device(place["index"])
    if place["store"] is None:
        return contextlib.nullcontext()
    dist: Any = torch_distributed
    store = dist.FileStore(place["store"], place["world_size"])
    size, timeout_s = place["world_size"], place["timeout_s"]
    return process_group(
        place["kind"], store, rank=place["rank"], world_size=size, timeout_s=timeout_s
    )


RankReport = Callable[[int, Any], None]

ALWAYS_IMPORTED = ("torch", "torch.distributed")
# torch.optim and DDP import it on first use, which takes longer than torch itself.
IMPORTED_TO_TRAIN = ("torch._dynamo",)
# Forked processes share the server's address layout; a new server now and then keeps one lucky or
# unlucky layout from colouring a whole benchmark.
FORKS_PER_SERVER = 32
# What imports may take beforehand on a slow file system.
_FORK_S = 120.0


def run_on_devices(
    devices: Sequence[Device],
    function: str,
    arguments: Mapping[str, Any],
    *,
    timeout_s: float,
    world: bool = False,
    on_report: RankReport | None = None,
    imported: Sequence[str] = (),
    trains: bool = True,
) -> list[Any]:
    """Call ``function(rank, world_size, arguments)`` in one fresh process per device; the results.

    `function` is ``module:name``; arguments and results are JSON values. With `world` a process
    group (gloo on cpu, NCCL on cuda) is up around the call. `on_report(rank, value)` gets what the
    ranks `report` as it comes. `imported` names more modules for the server to import beforehand;
    without `trains` what only optimizers and DDP need is left out.
    Raises ProbeError, or the EstimatorError that a rank raised, if a rank fails, dies or the time
    is over; no process outlives the call.
    """
    with DeviceProcesses(
        devices, world=world, imported=imported, trains=trains, world_s=timeout_s
    ) as ranks:
        return ranks.run(function, arguments, timeout_s=timeout_s, on_report=on_report)


class DeviceProcesses:
    """One fresh process per device for several calls one after the other, gone after the block.

    As for `run_on_devices`; a process group waits `world_s` at most for another rank. They start
    with the first call, and anew with the next one after a call that failed.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        world: bool = False,
        imported: Sequence[str] = (),
        trains: bool = True,
        world_s: float = 600.0,
    ) -> None:
        if not devices:
            raise ProbeError("there is no device to run on; name at least one")
        self.devices, self.world, self.world_s = devices, world, world_s
        self.modules = (*ALWAYS_IMPORTED, *(IMPORTED_TO_TRAIN if trains else ()), *imported)
        self.links: list[Connection] = []
        self.living: dict[int, int] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> DeviceProcesses:
        return self

    def _start(self) -> None:
        """Have all processes forked, and tell each where it is."""
        folder = tempfile.TemporaryDirectory(prefix="estimator-ranks-")
        self.folder = Path(self._stack.enter_context(folder))
        self.found: dict[int, Any] = {}
        self.failures: dict[int, EstimatorError] = {}
        try:
            self._stack.enter_context(_counted_run())
            for rank in range(len(self.devices)):
                log = os.open(self.log_path(rank), os.O_CREAT | os.O_WRONLY, 0o600)
                ours, theirs = Pipe()
                self.links.append(ours)
                with theirs:
                    self.living[rank] = _fork(self.modules, theirs, log)
                os.close(log)
                _send(ours, self._place(rank))
        except OSError as error:
            raise ProbeError(
                f"cannot start processes to measure in ({cause(error)}); check process and memory "
                "limits"
            ) from None

    def _place(self, rank: int) -> dict[str, Any]:
        device = self.devices[rank]
        return {
            "rank": rank,
            "world_size": len(self.devices),
            "kind": device.kind,
            "index": device.index,
            "cores": list(device.cores),
            "store": str(self.folder / "store") if self.world else None,
            "timeout_s": self.world_s,
            "path": sys.path,
            "folder": os.getcwd(),
        }

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log_path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def stop(self) -> None:
        """End all processes; their memory is free then."""
        for pid in self.living.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for rank in self.living:
            while self.links[rank].poll(5.0) and _received(self.links[rank]) is not None:
                pass
        for link in self.links:
            link.close()
        self.links, self.living = [], {}
        self._stack.close()

    def run(
        self,
        function: str,
        arguments: Mapping[str, Any],
        *,
        timeout_s: float,
        on_report: RankReport | None = None,
    ) -> list[Any]:
        """Call ``function(rank, world_size, arguments)`` on every rank; results in rank order."""
        try:
            if not self.links:
                self._start()
            self.found.clear()
            for rank in self.living:
                # Of a rank that has died meanwhile the end is read later.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    _send(self.links[rank], {"function": function, "arguments": dict(arguments)})
            self._await_results(timeout_s, on_report)
        except BaseException:
            self.stop()
            raise
        return [self.found[rank] for rank in range(len(self.links))]

    def _await_results(self, timeout_s: float, on_report: RankReport | None) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.found) < len(self.links):
            links = [self.links[rank] for rank in self.living]
            ready = wait(links, max(0.0, deadline - time.monotonic()))
            for rank in [rank for rank in self.living if self.links[rank] in ready]:
                self._receive(rank, on_report)
            if self.failures:
                raise self._cause()
            if not ready and time.monotonic() >= deadline:
                raise ProbeError(
                    f"measuring on {len(self.links)} devices did not end within "
                    f"{timeout_s:g} s and was stopped; close other programs or allow longer"
                )

    def _receive(self, rank: int, on_report: RankReport | None) -> None:
        """Take what a rank sent; the kernel closes its end only after it has freed its memory."""
        message = _received(self.links[rank])
        if message is None:
            del self.living[rank]
            if rank not in self.found and rank not in self.failures:
                self.failures[rank] = ProbeError(self._obituary(rank))
        elif "report" in message and on_report is not None:
            on_report(rank, message["report"])
        elif "result" in message:
            self.found[rank] = message["result"]
        elif "error" in message:
            self.failures[rank] = _error_from(rank, message)

    def _obituary(self, rank: int) -> str:
        text = self.log_path(rank).read_text(encoding="utf-8", errors="replace").strip()
        last = f" (its last words: {text.splitlines()[-1][:200]})" if text else ""
        return (
            f"the process of rank {rank} died without a result{last}, as when memory runs out; "
            "free memory, or measure something smaller"
        )

    def _cause(self) -> EstimatorError:
        """The failure that made the others fail: a lost peer is a consequence, not a cause."""
        for rank in self.living.keys() - self.failures.keys() - self.found.keys():
            if self.links[rank].poll(0.3):
                self._receive(rank, None)
        return min(self.failures.values(), key=lambda error: "gloo" in str(error).lower())


def _error_from(rank: int, message: Mapping[str, str]) -> EstimatorError:
    kind = getattr(errors, message["error"], None)
    if isinstance(kind, type) and issubclass(kind, EstimatorError):
        return kind(message["text"])
    return ProbeError(f"rank {rank} failed with {message['error']}: {message['text']}")


class _Server:
    """The process that ranks are forked from; it ends when this process does."""

    def __init__(self) -> None:
        self.owner, self.forks = os.getpid(), 0
        self.control, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from estimator.probe.devices.ranks import serve\n"
            f"serve({theirs.fileno()})"
        )
        with theirs:
            # A session of its own: Ctrl-C reaches this process, which stops the ranks in order.
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                # Otherwise NumPy starts a thread for each core of the machine, in every rank.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(self, modules: Sequence[str], link: Connection, log: int) -> int:
        """The pid of a new rank that has `modules`, speaks through `link` and writes to `log`."""
        self.forks += 1
        _send(self.control, modules)
        for descriptor in (link.fileno(), log):
            send_handle(self.control, descriptor, self.process.pid)
        pid = _received(self.control) if self.control.poll(_FORK_S) else None
        if pid is None:
            self.process.kill()
            raise OSError("the process that they are forked from does not answer")
        return int(pid)

    def close(self) -> None:
        """End the server and, should any still live, its ranks."""
        self.control.close()
        if self.owner == os.getpid():
            self.process.wait()

    def usable(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None


_server: _Server | None = None
_server_lock = threading.Lock()
_runs = 0


def _fork(modules: Sequence[str], link: Connection, log: int) -> int:
    """The pid of a new rank that has imported `modules`."""
    global _server
    with _server_lock:
        if _server is None or not _server.usable():
            _server = _Server()
        return _server.fork(modules, link, log)


@contextlib.contextmanager
def _counted_run() -> Iterator[None]:
    """A run of ranks; when none is on, a server that has served long ends."""
    global _runs
    with _server_lock:
        if _runs == 0 and _server is not None and _server.forks >= FORKS_PER_SERVER:
            _close_server()
        _runs += 1
    try:
        yield
    finally:
        with _server_lock:
            _runs -= 1


@atexit.register
def _close_server() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None
