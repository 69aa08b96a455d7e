"""Only those who share the secret of a launch are heard, each message once and where it belongs."""

from __future__ import annotations

import gc
import hashlib
import hmac
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torch_distributed

from estimator.errors import ProbeError
from estimator.machines.profile import Device
from estimator.probe.cluster.discovery import VARIABLE, Place, given_secret
from estimator.probe.cluster.signed_store import (
    SignedStore,
    listen,
    open_session,
    signed,
    verified,
)
from estimator.probe.devices.ranks import run_on_devices
from tests.conftest import free_port

dist: Any = torch_distributed
SECRET = "0123456789abcdef" * 2


def test_a_signature_is_the_hmac_of_the_key_with_its_length_and_the_body() -> None:
    text = b"\0\0\0\0\0\0\0\7round/1" + b"body"
    expected = hmac.new(b"secret", text, hashlib.sha256).hexdigest().encode()
    assert signed(b"secret", "round/1", b"body") == expected + b"body"


@pytest.mark.parametrize(
    ("secret", "key", "change"),
    [
        (b"another", "round/1", b""),
        (b"secret", "round/2", b""),
        (b"secret", "round/1", b"!"),
    ],
)
def test_other_secrets_keys_and_bodies_do_not_verify(
    secret: bytes, key: str, change: bytes
) -> None:
    text = signed(b"secret", "round/1", b"body")
    assert verified(b"secret", "round/1", text) == b"body"
    assert verified(secret, key, text + change) is None
    assert verified(b"secret", "round/1", b"") is None


# The secret of a launch.


def test_a_secret_comes_from_the_environment_and_is_long_enough() -> None:
    with pytest.raises(ProbeError, match="is not set; give all ranks one secret"):
        given_secret({})
    assert given_secret({VARIABLE: SECRET + "\n"}) == SECRET.encode()
    for secret, words in (("", "has 0 characters, fewer than 32"), ("x" * 31, "has 31 characters")):
        with pytest.raises(ProbeError, match=words):
            given_secret({VARIABLE: secret})


# Messages over a store.


def place_of(secret: str = SECRET, **more: Any) -> Place:
    more = {"rank": 0, "master_address": "127.0.0.1", "master_port": free_port(), **more}
    return Place(world_size=2, secret=secret.encode(), **more)


@pytest.fixture
def served() -> tuple[Place, SignedStore, Any]:
    """Rank 0's place and session, and its store as anybody reaches it."""
    place = place_of()
    session = open_session(place, 10.0)
    return place, session, reached(place.master_port)


def reached(port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))


def test_rank_0_listens_on_the_interface_that_leads_to_it_alone() -> None:
    with listen(place_of()) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    # An address of another host: rank 0 is behind a forwarded port.
    with listen(place_of(master_address="192.0.2.1")) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_taken_port_is_said() -> None:
    place = place_of()
    with (
        socket.create_server(("127.0.0.1", place.master_port)),
        pytest.raises(ProbeError, match=r"cannot listen on port \d+ .*MASTER_PORT"),
    ):
        listen(place)


def test_messages_of_this_session_are_read_and_replays_are_not(
    served: tuple[Place, SignedStore, Any],
) -> None:
    place, first, tcp_store = served
    second = open_session(replace(place, rank=1), 1.0)
    first.post("order/0", {"members": []})
    assert second.read("order/0") == {"members": []}
    assert second.read("order/1") is None
    raw = dist.PrefixStore("estimator/0", tcp_store)
    raw.set("order/1", raw.get("order/0"))
    assert second.read("order/1") is None
    assert second.forged == {"order/1"}
    # The next run of the same launch has the same secret, and another session.
    assert open_session(replace(place, has_store=True), 1.0).read("order/0") is None


def test_a_rank_with_another_secret_finds_out_before_it_sends_anything(
    served: tuple[Place, SignedStore, Any],
) -> None:
    place, _, tcp_store = served
    keys = tcp_store.num_keys()
    other = place_of("f" * 32, rank=1, master_port=place.master_port)
    with pytest.raises(ProbeError, match="has another secret than rank 1; give all ranks"):
        open_session(other, 1.0)
    assert tcp_store.num_keys() == keys


def test_what_is_posted_later_is_read_though_something_forged_was_there(
    served: tuple[Place, SignedStore, Any],
) -> None:
    _, first, tcp_store = served
    raw = dist.PrefixStore("estimator/0", tcp_store)
    SignedStore(raw, b"guessed").post("order/0", "forged")
    assert first.read("order/0") is None
    # Another thread waits meanwhile, past what is forged.
    own = first.clone()
    later = threading.Timer(0.2, own.post, args=("order/0", "real"))
    later.start()
    assert first.await_value("order/0") == "real"
    later.join()


def test_addresses_of_a_process_group_are_taken_from_its_own_ranks_only() -> None:
    inner = dist.HashStore()
    inner.set_timeout(timedelta(seconds=0.1))
    store = SignedStore(inner, b"secret")
    store.set("0//cpu//0/0", b"address")
    inner.set("copied", inner.get("0//cpu//0/0"))
    inner.set("forged", "elsewhere")
    assert store.get("0//cpu//0/0") == b"address"
    for key in ("copied", "forged"):
        with pytest.raises(RuntimeError, match=f"has signed '{key}'"):
            store.get(key)
    # Another session.
    with pytest.raises(RuntimeError):
        SignedStore(inner, b"other").get("0//cpu//0/0")


def test_a_process_groups_own_copy_of_its_store_checks_too(
    served: tuple[Place, SignedStore, Any],
) -> None:
    *_, tcp_store = served
    store = SignedStore(tcp_store, b"secret").clone(0.2)
    store.set("address", b"here")
    copy = dist.PrefixStore("group", store).clone()
    gc.collect()
    copy.set("address", b"there")
    assert copy.get("address") == b"there"
    assert store.get("group/address") == b"there"
    tcp_store.set("group/address", "forged")
    with pytest.raises(RuntimeError, match="has signed"):
        copy.get("address")


# Eight processes, each with three threads on the store beside its process group: what NCCL's
# watchdogs do, which ask a copy of their own in threads of their own.
RANKS, ROUNDS = 8, 25


def meet_over_a_signed_store(rank: int, _size: int, arguments: Mapping[str, Any]) -> float:
    """One rank's sum over all, which comes about only where every address was read and believed."""
    own = dist.PrefixStore("world", reached(arguments["port"]))
    store = SignedStore(own, SECRET.encode())
    heard: list[int] = []

    def watch(number: int) -> None:
        copy = dist.PrefixStore(f"watch/{number}", store).clone()
        for turn in range(ROUNDS):
            copy.set(f"{rank}/{turn}", str(turn))
            copy.wait([f"{(rank + 1) % RANKS}/{turn}"], timedelta(seconds=60))
            heard.append(int(copy.get(f"{(rank + 1) % RANKS}/{turn}")))

    threads = [threading.Thread(target=watch, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    half = dist.new_group([0, 2, 4, 6])
    total = torch.tensor([float(rank)])
    if rank % 2 == 0:
        dist.all_reduce(total, group=half)
    dist.all_reduce(total)
    for thread in threads:
        thread.join()
    dist.destroy_process_group()
    assert sorted(heard) == sorted(3 * list(range(ROUNDS)))
    return float(total)


def test_eight_processes_with_threads_meet_over_one_signed_store(
    served: tuple[Place, SignedStore, Any],
) -> None:
    place, _, tcp_store = served
    # A forger is there before them.
    tcp_store.set("world/0//cpu//0/0", "elsewhere")
    device = Device(kind="cpu", index=0, name="core", memory_bytes=1)
    found = run_on_devices(
        [device] * RANKS,
        f"{__name__}:meet_over_a_signed_store",
        {"port": place.master_port},
        timeout_s=120.0,
        trains=False,
    )
    # 0 + 2 + 4 + 6 = 12 on each of four, and 1 + 3 + 5 + 7.
    assert found == [4 * 12 + 16] * RANKS
