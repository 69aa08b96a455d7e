"""Find out from the environment which rank of how many a launcher made of this process."""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from estimator.errors import ProbeError, TopologyError, cause
from estimator.placement.topology import expand_hosts
from estimator.probe.launch_secret import FILE_VARIABLE, VARIABLE, given_secret
from estimator.units import parse_whole

Launcher = Literal["torchrun", "slurm", "openmpi", "pmi"]

# PyTorch's own default.
DEFAULT_PORT = 29500
# Slurm jobs that share a node must not share a port: from the job's number, below the ports that
# Linux hands out by itself (32768 and up).
_SLURM_PORTS = range(20000, 32000)
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank of a launched group, and where rank 0 is to be met.

    `local_rank` is None where the launcher does not say; `attempt` tells a restarted group from
    its predecessor. With `has_store` the launcher itself serves a store at that address. With
    `is_local` all ranks run on this host, and rank 0 makes the `secret` where none is given.
    """

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int | None = None
    master_address: str
    master_port: int = DEFAULT_PORT
    attempt: str = "0"
    has_store: bool = False
    is_local: bool = False
    secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ProbeError(
                f"{self.launcher} says this is rank {self.rank} of {self.world_size}; start every "
                "rank from 0 to one below the world size once"
            )
        if self.secret is None and not self.is_local:
            raise ProbeError(
                f"ranks on several hosts meet at {self.master_address}:{self.master_port}, where "
                f"others may connect too, and {VARIABLE} is not set; give all ranks one "
                f"secret by it or by {FILE_VARIABLE}, as 'estimator probe --launch' shows"
            )


def discover(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun, Slurm, Open MPI or a PMI launcher gave; None without a launcher.

    RANK and WORLD_SIZE win over the others, as whoever set them meant them. Raises ProbeError where
    a launcher says too little.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _from_torchrun(environment)
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _from_open_mpi(environment)
    # srun also sets PMI_RANK for programs that speak PMI.
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return _from_slurm(environment)
    if "PMI_RANK" in environment:
        return _from_pmi(environment)
    return None


def _from_torchrun(environment: Mapping[str, str]) -> Place:
    size = _number(environment, "WORLD_SIZE")
    is_alone = size in (1, _optional_number(environment, "LOCAL_WORLD_SIZE"))
    has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = _master(environment, "torchrun", is_alone=is_alone, is_served=has_store)
    return Place(
        launcher="torchrun",
        rank=_number(environment, "RANK"),
        world_size=size,
        local_rank=_optional_number(environment, "LOCAL_RANK"),
        master_address=address,
        master_port=_port(environment),
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        has_store=has_store,
        is_local=is_alone or is_loopback(address),
        secret=given_secret(environment),
    )


def _from_slurm(environment: Mapping[str, str]) -> Place:
    # https://slurm.schedmd.com/srun.html, "output environment variables".
    job = _number(environment, "SLURM_JOB_ID")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    is_alone = environment.get("SLURM_STEP_NUM_NODES") == "1"
    address = environment.get("MASTER_ADDR") or _first_host(nodes)
    return Place(
        launcher="slurm",
        rank=_number(environment, "SLURM_PROCID"),
        world_size=_number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=_optional_number(environment, "SLURM_LOCALID"),
        master_address=_LOOPBACK if is_alone else address,
        master_port=_port(environment, default=_SLURM_PORTS[job % len(_SLURM_PORTS)]),
        attempt=f"{job}.{environment['SLURM_STEP_ID']}",
        is_local=is_alone or is_loopback(address),
        secret=given_secret(environment),
    )


def _first_host(nodes: str) -> str:
    # A list such as a[1-4],b7: the first comma outside brackets ends the first pattern.
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    try:
        return next(expand_hosts(first))
    except TopologyError as error:
        raise ProbeError(
            f"Slurm's node list '{nodes}' does not name rank 0's node ({error}); set MASTER_ADDR"
        ) from None


def _from_open_mpi(environment: Mapping[str, str]) -> Place:
    # https://docs.open-mpi.org, "Environment variables set by Open MPI".
    size = _number(environment, "OMPI_COMM_WORLD_SIZE")
    is_alone = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size)
    address = _master(environment, "mpirun", is_alone=is_alone)
    return Place(
        launcher="openmpi",
        rank=_number(environment, "OMPI_COMM_WORLD_RANK"),
        world_size=size,
        local_rank=_optional_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK"),
        master_address=address,
        master_port=_port(environment),
        is_local=is_alone or is_loopback(address),
        secret=given_secret(environment),
    )


def _from_pmi(environment: Mapping[str, str]) -> Place:
    # MPICH's Hydra and Intel MPI set MPI_LOCALRANKID and MPI_LOCALNRANKS, Cray PMI_LOCAL_RANK.
    size = _number(environment, "PMI_SIZE")
    is_alone = environment.get("MPI_LOCALNRANKS") == str(size)
    address = _master(environment, "mpiexec", is_alone=is_alone)
    return Place(
        launcher="pmi",
        rank=_number(environment, "PMI_RANK"),
        world_size=size,
        local_rank=_optional_number(environment, "MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        master_address=address,
        master_port=_port(environment),
        is_local=is_alone or is_loopback(address),
        secret=given_secret(environment),
    )


def _master(
    environment: Mapping[str, str], launcher: str, *, is_alone: bool, is_served: bool = False
) -> str:
    """Rank 0's address; on one node it is the loopback, unless the launcher serves the store."""
    if is_alone and not is_served:
        return _LOOPBACK
    address = environment.get("MASTER_ADDR", "")
    if not address:
        raise ProbeError(
            f"{launcher} does not tell every rank where rank 0 is; export MASTER_ADDR, as in the "
            "command that 'estimator probe --launch' prints"
        )
    return address


def is_loopback(address: str) -> bool:
    """Whether an address as written is this host's alone; a name may be another host's."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _port(environment: Mapping[str, str], *, default: int = DEFAULT_PORT) -> int:
    port = _optional_number(environment, "MASTER_PORT")
    if port is not None and not 0 < port < 1 << 16:
        raise ProbeError(f"MASTER_PORT is {port}; choose a port from 1 to 65535")
    return default if port is None else port


def _number(environment: Mapping[str, str], *names: str) -> int:
    found = _optional_number(environment, *names)
    if found is None:
        raise ProbeError(f"{names[0]} is not set in this rank; start all ranks with one launcher")
    return found


def _optional_number(environment: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        text = environment.get(name)
        if text is not None:
            try:
                return parse_whole(text)
            except ValueError as error:
                raise ProbeError(f"{name}: {error}, or unset it") from None
    return None


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
