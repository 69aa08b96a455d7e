"""torchrun, or what sets its variables, says which rank this is and where rank 0 is to be met."""

from __future__ import annotations

import pytest

from estimator.errors import ProbeError
from estimator.probe.cluster.discovery import (
    VARIABLE,
    discover,
    interface_of,
    is_loopback,
    own_address_towards,
)

SECRET = {VARIABLE: "0123456789abcdef" * 2}
TWO_HOSTS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n0"}


def test_torchrun_says_where_its_own_store_is() -> None:
    place = discover(
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "a1",
            "MASTER_PORT": "29400",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **SECRET,
        }
    )
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank) == (5, 8, 1)
    assert (place.master_address, place.master_port) == ("a1", 29400)
    assert (place.attempt, place.has_store) == ("2", True)


def test_four_variables_that_any_launcher_can_set_are_enough() -> None:
    place = discover({**TWO_HOSTS, **SECRET})
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank) == (0, 2, None)
    # 29500 is what torchrun takes where it is told nothing (torch/distributed/run.py).
    assert (place.master_address, place.master_port, place.has_store) == ("n0", 29500, False)


@pytest.mark.parametrize("environment", [TWO_HOSTS, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_ranks_are_refused_without_a_secret(environment: dict[str, str]) -> None:
    with pytest.raises(ProbeError, match=f"{VARIABLE} is not set; give all ranks one secret"):
        discover(environment)
    place = discover({**environment, **SECRET})
    assert place is not None
    assert place.secret == SECRET[VARIABLE].encode()
    assert SECRET[VARIABLE] not in repr(place)


@pytest.mark.parametrize(
    "environment",
    [
        {**TWO_HOSTS, "MASTER_ADDR": "127.0.0.1"},
        {**TWO_HOSTS, "MASTER_ADDR": "localhost"},
        {**TWO_HOSTS, "MASTER_ADDR": "::1"},
        {**TWO_HOSTS, "LOCAL_WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_ranks_on_one_host_meet_on_the_loopback(
    environment: dict[str, str],
) -> None:
    place = discover({**environment, **SECRET})
    assert place is not None
    assert is_loopback(place.master_address)


def test_without_a_launcher_there_is_no_place() -> None:
    assert discover({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK: 'one' is no whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK: '2' is not from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "export MASTER_ADDR"),
        ({**TWO_HOSTS, "MASTER_PORT": "99999"}, "MASTER_PORT: '99999' is not from 1 to 65535"),
    ],
)
def test_half_a_launcher_is_refused_in_one_sentence(
    environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ProbeError, match=words):
        discover({**environment, **SECRET})


def test_the_loopback_interface_has_the_address_that_leads_to_it() -> None:
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") in ("lo", None)  # None: this system does not tell
    assert interface_of("192.0.2.1") is None  # reserved for documentation, RFC 5737
