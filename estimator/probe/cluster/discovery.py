"""Find out which rank of how many this process is, and the secret of its launch."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from estimator.errors import ProbeError, cause
from estimator.units import parse_whole

VARIABLE = "ESTIMATOR_PROBE_SECRET"
# 128 bits in hexadecimal digits.
LEAST_CHARACTERS = 32
MAKE_ONE = "python -c 'import secrets; print(secrets.token_hex(32))'"
# PyTorch's own default.
DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank of a launched group, and where rank 0 is to be met.

    `local_rank` is None where the launcher does not say; `attempt` tells a restarted group from
    its predecessor. With `has_store` the launcher itself serves a store at that address.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    master_address: str
    master_port: int = DEFAULT_PORT
    attempt: str = "0"
    has_store: bool = False
    secret: bytes = field(repr=False)


def discover(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun's environment variables give; None where there are none.

    Other launchers can set the same: RANK, WORLD_SIZE, MASTER_ADDR, and where they are known
    LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_PORT. Raises ProbeError where they say too little.
    """
    if not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return None
    size = _number(environment, "WORLD_SIZE", least=1)
    is_alone = size in (1, _number(environment, "LOCAL_WORLD_SIZE", default="0"))
    has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = environment.get("MASTER_ADDR", "")
    if is_alone and not has_store:
        address = "127.0.0.1"
    elif not address:
        raise ProbeError(
            "nothing tells the ranks where rank 0 is; export MASTER_ADDR, or start them by torchrun"
        )
    return Place(
        rank=_number(environment, "RANK", most=size - 1),
        world_size=size,
        local_rank=_number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else None,
        master_address=address,
        master_port=_number(environment, "MASTER_PORT", 1, 65535, default=str(DEFAULT_PORT)),
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        has_store=has_store,
        secret=given_secret(environment),
    )


def given_secret(environment: Mapping[str, str]) -> bytes:
    """The secret in the environment; raises ProbeError where there is none, or a short one."""
    text = environment.get(VARIABLE)
    if text is None:
        raise ProbeError(
            f"others may connect where ranks meet, and {VARIABLE} is not set; give all ranks one "
            f"secret, such as {MAKE_ONE} prints, or probe one machine by 'estimator probe'"
        )
    text = text.strip()
    if len(text) < LEAST_CHARACTERS:
        raise ProbeError(
            f"the secret in {VARIABLE} has {len(text)} characters, fewer than {LEAST_CHARACTERS}; "
            f"make one with {MAKE_ONE}"
        )
    return text.encode()


def is_loopback(address: str) -> bool:
    """Whether an address as written is this host's alone; a name may be another host's."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _number(
    environment: Mapping[str, str], name: str, least: int = 0, most: int = 10**6, default: str = ""
) -> int:
    """A number among torchrun's variables; raises ProbeError."""
    try:
        return parse_whole(environment.get(name, default), least=least, most=most)
    except ValueError as error:
        raise ProbeError(f"{name}: {error}, or unset it") from None


def own_address_towards(address: str) -> str:
    """The address of this host on the way to `address`; nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(target)
            return str(way.getsockname()[0])
    except OSError as error:
        raise ProbeError(
            f"there is no way from {socket.gethostname()} to {address} ({cause(error)}); check the "
            "network"
        ) from None


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None where the system does not tell."""
    if sys.platform != "linux":
        return None
    import fcntl

    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
            try:
                # SIOCGIFADDR, netdevice(7): bytes 20 to 24 of the answer are the address.
                answer = fcntl.ioctl(query, 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
        if socket.inet_ntoa(answer[20:24]) == address:
            return name
    return None
