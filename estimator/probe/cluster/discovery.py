"""Find out which rank of how many a launcher made of this process, and the launch's secret."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import socket
import stat
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent, indent
from typing import Literal, NamedTuple

from estimator.errors import ProbeError, TopologyError, cause
from estimator.placement.topology import expand_hosts
from estimator.units import parse_whole

VARIABLE = "ESTIMATOR_PROBE_SECRET"
FILE_VARIABLE = "ESTIMATOR_PROBE_SECRET_FILE"
# 128 bits in hexadecimal digits.
LEAST_CHARACTERS = 32
_MOST_CHARACTERS = 4096
MAKE_ONE = "python -c 'import secrets; print(secrets.token_hex(32))'"


def given_secret(environment: Mapping[str, str]) -> bytes | None:
    """The secret in the environment, or in the file that it names; None without either.

    Raises ProbeError where it is too short, or others than the owner may read the file.
    """
    text, where = environment.get(VARIABLE), VARIABLE
    path = environment.get(FILE_VARIABLE)
    if text is None and path is not None:
        text, where = _read_private(Path(path)), f"the file {path}"
    if text is None:
        return None
    text = text.strip()
    if not LEAST_CHARACTERS <= len(text) <= _MOST_CHARACTERS:
        raise ProbeError(
            f"the secret in {where} has {len(text)} characters, not {LEAST_CHARACTERS} to "
            f"{_MOST_CHARACTERS}; make one with {MAKE_ONE}"
        )
    return text.encode()


def _read_private(path: Path) -> str:
    """The text of a file that only its owner, this user or root, may open."""
    try:
        # Not to wait for the other end where this is a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, encoding="utf-8") as file:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise ProbeError(f"{path} is no regular file; write the secret to one of mode 0600")
            if state.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(state.st_mode) & 0o077:
                raise ProbeError(
                    f"{path} is of user {state.st_uid} with mode {stat.S_IMODE(state.st_mode):04o},"
                    " so that others can read the secret; own it and run chmod 600 on it"
                )
            return file.read(_MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ProbeError(
            f"the secret cannot be read from {path} ({cause(error)}); write one there, mode 0600"
        ) from None


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
    `is_local` all ranks run on this host, and need no `secret` to be probed as one machine.
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


class _Words(NamedTuple):
    """The environment variables of a launcher: it is there where all of `signs` are set.

    Of several names for one number the first that is set counts.
    """

    launcher: Launcher
    signs: tuple[str, ...]
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: str


_LAUNCHERS = (
    # RANK and WORLD_SIZE win over the others, as whoever set them meant them.
    _Words(
        "torchrun",
        ("RANK", "WORLD_SIZE"),
        "RANK",
        ("WORLD_SIZE",),
        ("LOCAL_RANK",),
        "LOCAL_WORLD_SIZE",
    ),
    # https://docs.open-mpi.org, "Environment variables set by Open MPI".
    _Words(
        "openmpi",
        ("OMPI_COMM_WORLD_RANK",),
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # https://slurm.schedmd.com/srun.html, "output environment variables". Before PMI's: srun also
    # sets PMI_RANK for programs that speak PMI.
    _Words(
        "slurm",
        ("SLURM_PROCID", "SLURM_STEP_ID"),
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        "",
    ),
    # MPICH's Hydra and Intel MPI set MPI_LOCALRANKID and MPI_LOCALNRANKS, Cray PMI_LOCAL_RANK.
    _Words(
        "pmi",
        ("PMI_RANK",),
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        "MPI_LOCALNRANKS",
    ),
)


def discover(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun, Slurm, Open MPI or a PMI launcher gave; None without a launcher.

    Raises ProbeError where a launcher says too little.
    """
    for words in _LAUNCHERS:
        if all(name in environment for name in words.signs):
            return _place(words, environment)
    return None


def _place(words: _Words, environment: Mapping[str, str]) -> Place:
    size = _number(environment, *words.size)
    is_alone = size in (1, _optional_number(environment, words.local_size))
    has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = environment.get("MASTER_ADDR", ""), DEFAULT_PORT
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    if words.launcher == "slurm":
        job = _number(environment, "SLURM_JOB_ID")
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        is_alone = environment.get("SLURM_STEP_NUM_NODES") == "1"
        address = address or _first_host(nodes)
        port = _SLURM_PORTS[job % len(_SLURM_PORTS)]
        attempt = f"{job}.{environment['SLURM_STEP_ID']}"
    if is_alone and not has_store:
        address = _LOOPBACK
    elif not address:
        raise ProbeError(
            f"{words.launcher} does not tell every rank where rank 0 is; export MASTER_ADDR, as in "
            "the command that 'estimator probe --launch' prints"
        )
    return Place(
        launcher=words.launcher,
        rank=_number(environment, words.rank),
        world_size=size,
        local_rank=_optional_number(environment, *words.local_rank),
        master_address=address,
        master_port=_port(environment, default=port),
        attempt=attempt,
        has_store=has_store,
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


def is_loopback(address: str) -> bool:
    """Whether an address as written is this host's alone; a name may be another host's."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _port(environment: Mapping[str, str], *, default: int) -> int:
    port = _optional_number(environment, "MASTER_PORT")
    if port is not None and not 0 < port < 1 << 16:
        raise ProbeError(f"MASTER_PORT is {port}; choose a port from 1 to 65535")
    return default if port is None else port


def _number(environment: Mapping[str, str], *names: str) -> int:
    number = _optional_number(environment, *names)
    if number is None:
        raise ProbeError(f"{names[0]} is not set in this rank; start all ranks with one launcher")
    return number


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


Cluster = Literal["slurm", "mpi", "k8s"]

# Every launch has a secret of its own, made where it starts; no text holds one.
_EXPORT = f'export {VARIABLE}="$({MAKE_ONE})"\n'


def launch_text(
    cluster: Cluster, *, nodes: int, devices: int, on_gpus: bool, options: Sequence[str]
) -> str:
    """What to run, or to apply, to probe `nodes` nodes with `devices` ranks on each.

    `options` go to the probe. Rank 0 writes the profile on the first node.

    >>> print(launch_text("slurm", nodes=2, devices=8, on_gpus=True, options=("--name", "h100")))
    export ESTIMATOR_PROBE_SECRET="$(python -c 'import secrets; print(secrets.token_hex(32))')"
    srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --cpu-bind=none \\
      --kill-on-bad-exit=0 --wait=0 python -m estimator.probe --name h100
    """
    return _WRITERS[cluster](nodes, devices, on_gpus, shlex.join(options))


def _slurm(nodes: int, devices: int, on_gpus: bool, options: str) -> str:
    # The others go on where one task dies; cores are shared out by the probe itself.
    gpus = f" --gpus-per-node={devices}" if on_gpus else ""
    # srun hands the environment on (its default, --export=ALL).
    return (
        f"{_EXPORT}"
        f"srun --nodes={nodes} --ntasks-per-node={devices}{gpus} --exclusive --cpu-bind=none \\\n"
        f"  --kill-on-bad-exit=0 --wait=0 python -m estimator.probe {options}".rstrip()
    )


def _mpi(nodes: int, devices: int, _on_gpus: bool, options: str) -> str:
    # Open MPI 4 and 5 alike: https://docs.open-mpi.org, "Scheduling processes across hosts".
    return (
        f"# On the first node of the file HOSTS, with a line 'NODE slots={devices}' for each:\n"
        f"{_EXPORT}"
        f"mpirun -np {nodes * devices} --hostfile HOSTS --map-by ppr:{devices}:node "
        "--bind-to none \\\n"
        f'  -x MASTER_ADDR="$(hostname)" -x MASTER_PORT={DEFAULT_PORT} '
        f"-x {VARIABLE} \\\n"
        f"  python -m estimator.probe {options}".rstrip()
    )


def _kubernetes(nodes: int, devices: int, on_gpus: bool, options: str) -> str:
    # https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/; a backoff limit for
    # each index (1.29 and later) leaves the others running.
    if "--json" not in options.split():
        options = f"{options} --json"
    limits = f"\nresources: {{limits: {{nvidia.com/gpu: {devices}}}}}" if on_gpus else ""
    manifest = dedent(
        f"""\
        # Give all ranks one secret: {MAKE_ONE} |
        #   kubectl create secret generic estimator-probe --from-file=secret=/dev/stdin
        # Put an image with torch and throughput-estimator in place of IMAGE, kubectl apply -f it,
        # and once the job is complete keep the profile, all that rank 0's pod prints:
        #   kubectl logs --tail=-1 > PROFILE.json \\
        #     -l job-name=estimator-probe,batch.kubernetes.io/job-completion-index=0
        # What it says beside that is in: kubectl describe pod -l job-name=estimator-probe
        apiVersion: v1
        kind: Service
        metadata: {{name: estimator-probe}}
        spec:
          clusterIP: None
          publishNotReadyAddresses: true
          selector: {{job-name: estimator-probe}}
        ---
        apiVersion: batch/v1
        kind: Job
        metadata: {{name: estimator-probe}}
        spec:
          completions: {nodes}
          parallelism: {nodes}
          completionMode: Indexed
          backoffLimitPerIndex: 0
          template:
            metadata: {{labels: {{app: estimator-probe}}}}
            spec:
              subdomain: estimator-probe
              restartPolicy: Never
              affinity:
                podAntiAffinity:
                  requiredDuringSchedulingIgnoredDuringExecution:
                  - topologyKey: kubernetes.io/hostname
                    labelSelector: {{matchLabels: {{app: estimator-probe}}}}
              volumes: [{{name: shm, emptyDir: {{medium: Memory}}}}]
              containers:
              - name: probe
                image: IMAGE
                env:
                - name: {VARIABLE}
                  valueFrom: {{secretKeyRef: {{name: estimator-probe, key: secret}}}}
                volumeMounts: [{{name: shm, mountPath: /dev/shm}}]
                command: [sh, -c]
                args:
                - >-
                  exec torchrun --nnodes {nodes} --node-rank $JOB_COMPLETION_INDEX
                  --nproc-per-node {devices} --master-addr estimator-probe-0.estimator-probe
                  --master-port {DEFAULT_PORT} -m estimator.probe {options}
                  2>/dev/termination-log
        """
    )
    image = "        image: IMAGE"
    return manifest.replace(image, image + indent(limits, " " * 8)).rstrip()


_WRITERS: dict[Cluster, Callable[[int, int, bool, str], str]] = {
    "slurm": _slurm,
    "mpi": _mpi,
    "k8s": _kubernetes,
}
