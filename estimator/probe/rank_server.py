"""Fork ranks, each of which pins itself and runs one function, in a process that imported torch.

Importing torch takes a second or two. The server imports it and does nothing else: no tensor, no
thread, no process group; a rank forked from it behaves as a newly started process would.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

_connection: socket.socket | None = None


def report(value: Any) -> None:
    """Send a partial result (JSON values) from inside a rank to the `on_report` of its run."""
    if _connection is not None:
        send(_connection, {"report": value})


def send(link: socket.socket, message: Mapping[str, Any]) -> None:
    """One message of the conversation between a rank and whoever asked for it: a line of JSON."""
    link.sendall(json.dumps(message).encode() + b"\n")


def serve(control_number: int, modules: Sequence[str]) -> None:
    """Import `modules`, then fork a rank for every pair of descriptors received."""
    control = socket.socket(fileno=control_number)
    # Asking the CUDA runtime for its devices, as some modules do when imported, would keep every
    # forked rank from using them; asking NVML does not (torch.cuda.is_available, "fork poisoning").
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for module in modules:
        importlib.import_module(module)
    children: set[int] = set()

    def bury(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while child := os.waitpid(-1, os.WNOHANG)[0]:
                children.discard(child)

    signal.signal(signal.SIGCHLD, bury)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            break
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        child = os.fork()
        if child == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            _be_rank(*descriptors)
        children.add(child)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        for descriptor in descriptors:
            os.close(descriptor)
    for child in children:
        os.kill(child, signal.SIGKILL)
    # Tearing down what was imported takes seconds, and whoever asked waits for this process.
    os._exit(0)


class _LastWords:
    """Carries whatever ends a rank to the process that asked for it, then ends the rank."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and _connection is not None:
            text = " ".join(str(error).split())[:400] or "no message"
            with contextlib.suppress(OSError):
                send(_connection, {"error": kind.__name__, "text": text})
        os._exit(0 if kind is None else 1)


def _be_rank(link_number: int, log: int) -> None:
    """The whole life of a forked process."""
    global _connection
    _connection = socket.socket(fileno=link_number)
    with _LastWords():
        _die_with_parent()
        os.dup2(log, 1)
        os.dup2(log, 2)
        send(_connection, {"pid": os.getpid()})
        with _connection.makefile("rb") as stream:
            order = json.loads(stream.readline())
        sys.path[:] = order["path"]
        os.chdir(order["folder"])
        threads = _pin(order["cores"])
        import torch

        torch.set_num_threads(threads)
        module, _, name = order["function"].partition(":")
        with _process_group(order):
            function = getattr(importlib.import_module(module), name)
            result = function(order["rank"], order["world_size"], order["arguments"])
        send(_connection, {"result": result})


def _die_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        # PR_SET_PDEATHSIG (prctl(2)): a rank does not outlive the server, however that ends.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _pin(cores: Sequence[int]) -> int:
    """Bind this process to `cores`; the number of threads it shall compute with."""
    # Without cores (accelerators) one thread, as torchrun sets it for its workers.
    threads = max(1, len(cores))
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    return threads


@contextlib.contextmanager
def _process_group(order: Mapping[str, Any]) -> Iterator[None]:
    """A torch.distributed world around the call, if the run asked for one."""
    import torch

    device = None
    if order["kind"] == "cuda":
        torch.cuda.set_device(order["index"])
        device = torch.device("cuda", order["index"])
    if order["store"] is None:
        yield
        return
    from datetime import timedelta

    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    # Gloo otherwise looks up the host's own name, which fails on machines without a name service.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        "nccl" if order["kind"] == "cuda" else "gloo",
        store=dist.FileStore(order["store"], order["world_size"]),
        rank=order["rank"],
        world_size=order["world_size"],
        timeout=timedelta(seconds=max(1.0, order["timeout_s"])),
        device_id=device,
    )
    yield
    dist.destroy_process_group()
