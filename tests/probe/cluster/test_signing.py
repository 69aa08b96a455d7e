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
    MAX_MESSAGE_BYTES,
    SignedStore,
    Signer,
    connect,
    listen,
    session_of,
)
from estimator.probe.devices.ranks import run_on_devices
from tests.conftest import free_port

dist: Any = torch_distributed
SECRET = "0123456789abcdef" * 2


def test_a_signature_is_the_hmac_of_the_key_with_its_length_and_the_body() -> None:
    text = b"\0\0\0\0\0\0\0\7round/1" + b"body"
    expected = hmac.new(b"secret", text, hashlib.sha256).hexdigest().encode()
    assert Signer(b"secret").sign("round/1", b"body") == expected + b"body"


@pytest.mark.parametrize(
    ("signer", "key", "change"),
    [
        (Signer(b"another"), "round/1", b""),
        (Signer(b"secret").derived("session", "1"), "round/1", b""),
        (Signer(b"secret"), "round/2", b""),
        (Signer(b"secret"), "round/1", b"!"),
    ],
)
def test_other_secrets_sessions_keys_and_bodies_do_not_verify(
    signer: Signer, key: str, change: bytes
) -> None:
    signed = Signer(b"secret").sign("round/1", b"body")
    assert Signer(b"secret").verified("round/1", signed) == b"body"
    assert signer.verified(key, signed + change) is None
    assert Signer(b"secret").verified("round/1", b"") is None


def test_a_signer_does_not_print_its_secret() -> None:
    assert "secret'" not in repr(Signer(b"secret"))


def test_too_long_a_message_is_not_sent() -> None:
    store = SignedStore(dist.HashStore(), Signer(b"secret"))
    with pytest.raises(ProbeError, match="smaller --budget"):
        store.post("key", "x" * MAX_MESSAGE_BYTES)


def test_what_a_forger_fills_the_store_with_is_not_even_looked_at() -> None:
    inner = dist.HashStore()
    store = SignedStore(inner, Signer(b"secret"))
    inner.set("key", "x" * (MAX_MESSAGE_BYTES + 100))
    assert store.read("key") is None
    assert store.forged == {"key"}


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
    return Place(world_size=2, is_local=True, secret=secret.encode(), **more)


@pytest.fixture
def served() -> tuple[Place, Any]:
    place = place_of()
    store = connect(place.master_address, place.master_port, listener=listen(place), timeout_s=10.0)
    return place, store


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


def test_messages_of_this_session_are_read_and_replays_are_not(served: tuple[Place, Any]) -> None:
    place, tcp_store = served
    first = session_of(tcp_store, place, 1.0)
    second = session_of(tcp_store, replace(place, rank=1), 1.0)
    first.post("order/0", {"members": []})
    assert second.read("order/0") == {"members": []}
    assert second.read("order/1") is None
    raw = dist.PrefixStore("estimator/0", tcp_store)
    raw.set("order/1", raw.get("order/0"))
    assert second.read("order/1") is None
    assert second.forged == {"order/1"}
    # The next run of the same launch has the same secret, and another session.
    assert session_of(tcp_store, place, 1.0).read("order/0") is None


def test_a_rank_with_another_secret_finds_out_before_it_sends_anything(
    served: tuple[Place, Any],
) -> None:
    place, tcp_store = served
    session_of(tcp_store, place, 1.0)
    keys = tcp_store.num_keys()
    other = place_of("f" * 32, rank=1, master_port=place.master_port)
    with pytest.raises(ProbeError, match="has another secret than rank 1; give all ranks"):
        session_of(tcp_store, other, 1.0)
    assert tcp_store.num_keys() == keys


def test_what_is_posted_later_is_read_though_something_forged_was_there(
    served: tuple[Place, Any],
) -> None:
    place, tcp_store = served
    first = session_of(tcp_store, place, 1.0)
    raw = dist.PrefixStore("estimator/0", tcp_store)
    SignedStore(raw, Signer(b"guessed")).post("order/0", "forged")
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
    store = SignedStore(inner, Signer(b"secret").derived("world/0/0"))
    store.set("0//cpu//0/0", b"address")
    inner.set("copied", inner.get("0//cpu//0/0"))
    inner.set("forged", "elsewhere")
    assert store.get("0//cpu//0/0") == b"address"
    for key in ("copied", "forged"):
        with pytest.raises(RuntimeError, match=f"has signed '{key}'"):
            store.get(key)
    # Another group of the same run.
    with pytest.raises(RuntimeError):
        SignedStore(inner, Signer(b"secret").derived("world/1/0")).get("0//cpu//0/0")


def test_a_process_groups_own_copy_of_its_store_checks_too(served: tuple[Place, Any]) -> None:
    _, tcp_store = served
    tcp_store.set_timeout(timedelta(seconds=0.2))
    store = SignedStore(tcp_store, Signer(b"secret"))
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
    own = connect("127.0.0.1", arguments["port"], timeout_s=60.0)
    own.set_timeout(timedelta(seconds=60))
    store = SignedStore(dist.PrefixStore("world", own), Signer(SECRET.encode()))
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


def test_eight_processes_with_threads_meet_over_one_signed_store(served: tuple[Place, Any]) -> None:
    place, tcp_store = served
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
