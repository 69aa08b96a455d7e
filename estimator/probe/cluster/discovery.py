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
# The numbers among torchrun's variables: the least and the most that each can be.
_NUMBERS = {
    "RANK": (0, 10**6),
    "WORLD_SIZE": (1, 10**6),
    "LOCAL_RANK": (0, 10**6),
    "LOCAL_WORLD_SIZE": (1, 10**6),
    "MASTER_PORT": (1, 65535),
}
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank of a launched group, and where rank 0 is to be met.

    `local_rank` is None where the launcher does not say; `attempt` tells a restarted group from
    its predecessor. With `has_store` the launcher itself serves a store at that address. With
    `is_local` all ranks run on this host.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    master_address: str
    master_port: int = DEFAULT_PORT
    attempt: str = "0"
    has_store: bool = False
    is_local: bool = False
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ProbeError(
                f"this is rank {self.rank} of {self.world_size}; start every rank from 0 to one "
                "below the world size once"
            )


def discover(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun's environment variables give; None where there are none.

    Other launchers can set the same: RANK, WORLD_SIZE, MASTER_ADDR, and where they are known
    LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_PORT. Raises ProbeError where they say too little.
    """
    if not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return None
    given = _numbers(environment)
    size = given["WORLD_SIZE"]
    is_alone = size in (1, given.get("LOCAL_WORLD_SIZE"))
    has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = environment.get("MASTER_ADDR", "")
    if is_alone and not has_store:
        address = _LOOPBACK
    elif not address:
        raise ProbeError(
            "nothing tells the ranks where rank 0 is; export MASTER_ADDR, or start them by torchrun"
        )
    return Place(
        rank=given["RANK"],
        world_size=size,
        local_rank=given.get("LOCAL_RANK"),
        master_address=address,
        master_port=given.get("MASTER_PORT", DEFAULT_PORT),
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        has_store=has_store,
        is_local=is_alone or is_loopback(address),
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


def _numbers(environment: Mapping[str, str]) -> dict[str, int]:
    """The numbers among torchrun's variables that are there; raises ProbeError."""
    numbers = {}
    for name, (least, most) in _NUMBERS.items():
        if (text := environment.get(name)) is not None:
            try:
                numbers[name] = parse_whole(text, least=least, most=most)
            except ValueError as error:
                raise ProbeError(f"{name}: {error}, or unset it") from None
    return numbers


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
