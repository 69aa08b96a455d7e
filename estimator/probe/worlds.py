"""Run one rank's share of a measurement inside a process group that spans nodes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from estimator.errors import ProbeError
from estimator.probe.message_store import MessageStore, connect
from estimator.probe.rank_functions import function_named
from estimator.probe.signing import Signer

# How often a rank sees whether its measurement was called off because another rank was lost.
_POLL_S = 0.25
_CALLED_OFF = 3
# What measurements need, imported once per rank and not once per measurement.
MODULES = ("estimator.probe.signed_store", "estimator.probe.worlds")


def in_world(_rank: int, _world_size: int, arguments: Mapping[str, Any]) -> Any:
    """Join the group that `arguments` describes, call its function there, leave.

    Called in a fresh process pinned to its device. Ends the process when the key `cancel` appears
    in the store, or the store is gone: gloo may otherwise wait for a lost peer until its timeout.
    """
    import torch
    import torch.distributed as torch_distributed

    from estimator.probe.signed_store import SignedStore

    dist: Any = torch_distributed
    order = arguments["world"]
    timeout = timedelta(seconds=order["timeout_s"])
    signer = Signer(bytes.fromhex(order["session_key"]))
    if order["interface"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", order["interface"])
    on_cuda = order["kind"] == "cuda"
    store = connect(order["address"], order["port"], timeout_s=order["timeout_s"])
    store.set_timeout(timeout)
    _end_when_called_off(order, signer)
    prefix = f"{order['prefix']}/{order['group']}"
    signed = SignedStore(dist.PrefixStore(prefix, store), signer.derived(order["group"]))
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=signed,
        rank=order["rank"],
        world_size=order["world_size"],
        timeout=timeout,
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_cuda else None,
    )
    function = function_named(arguments["function"])
    result = function.call(order["rank"], order["world_size"], arguments["arguments"])
    # A rank that leaves first would end connections that others still use.
    dist.barrier()
    dist.destroy_process_group()
    return result


def nothing(_rank: int, _world_size: int, _arguments: Mapping[str, Any]) -> None:
    """What a rank runs first, so that its server has imported torch before anything is timed."""


def _end_when_called_off(order: Mapping[str, Any], signer: Signer) -> None:
    store = connect(order["address"], order["port"], timeout_s=order["timeout_s"])
    messages = MessageStore(store, order["attempt"], signer)

    def poll() -> None:
        with contextlib.suppress(ProbeError):
            while messages.read(order["cancel"]) is None:
                time.sleep(_POLL_S)
        os._exit(_CALLED_OFF)

    threading.Thread(target=poll, daemon=True).start()
