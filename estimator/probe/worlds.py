"""Run one rank's share of a measurement inside a process group that spans nodes."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

# How often a rank looks whether its measurement was called off because another rank was lost.
_POLL_S = 0.25
_CALLED_OFF = 3
# What measurements need, imported once per rank and not once per measurement.
MODULES = ("estimator.probe.network", "estimator.probe.overlap", "estimator.probe.shapes")


def in_world(_rank: int, _world_size: int, arguments: Mapping[str, Any]) -> Any:
    """Join the group that `arguments` describes, call its function there, leave.

    Called in a fresh process pinned to its device. Ends the process when the key `cancel` appears
    in the store, or the store is gone: gloo may otherwise wait for a lost peer until its timeout.
    """
    import torch
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    order = arguments["world"]
    timeout = timedelta(seconds=order["timeout_s"])
    if order["interface"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", order["interface"])
    on_cuda = order["kind"] == "cuda"
    store = dist.TCPStore(order["address"], order["port"], is_master=False, timeout=timeout)
    _end_when_called_off(dist, order)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=dist.PrefixStore(order["prefix"], store),
        rank=order["rank"],
        world_size=order["world_size"],
        timeout=timeout,
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_cuda else None,
    )
    module, _, name = arguments["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    result = function(order["rank"], order["world_size"], arguments["arguments"])
    # A rank that leaves first would end connections that others still use.
    dist.barrier()
    dist.destroy_process_group()
    return result


def nothing(_rank: int, _world_size: int, _arguments: Mapping[str, Any]) -> None:
    """What a rank runs first, so that its server has imported torch before anything is timed."""


def _end_when_called_off(dist: Any, order: Mapping[str, Any]) -> None:
    timeout = timedelta(seconds=order["timeout_s"])
    store = dist.TCPStore(order["address"], order["port"], is_master=False, timeout=timeout)

    def look() -> None:
        with contextlib.suppress(RuntimeError):
            while not store.check([order["cancel"]]):
                time.sleep(_POLL_S)
        os._exit(_CALLED_OFF)

    threading.Thread(target=look, daemon=True).start()
