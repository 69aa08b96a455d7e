"""Build a testbed's nodes and switches from network namespaces, and take them away again.

A namespace per node holds the end ``eth0`` of a veth pair whose other end is a port of the bridge
in its switch's namespace; racks are joined to the spine in the same way. Each end of each pair
sends through a token bucket (tc-tbf(8)), so a line rate holds in each direction. Nothing of it
shows outside the namespaces, whose names carry the process id of their owner.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from estimator.errors import ProbeError

from .description import SPINE, TestbedDescription

INTERFACE = "eth0"
_NETWORK = "10.77"
_PREFIX = re.compile(r"(tb(\d+)x\d+-).+")
# A full bucket lets that much through at once: 2 ms of the rate, so that a message is hardly
# faster than its line, within what tbf can do: some packets, and at most 128 kB.
_BURST_S, _LEAST_BURST_BYTES, _MOST_BURST_BYTES = 2e-3, 16_000, 128_000
# Room for several flows' windows: TCP then loses packets so rarely that lines stay full.
_QUEUE_BYTES = 4_000_000
_count = itertools.count()

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """A testbed that is up: `prefix` starts the names of its namespaces."""

    __test__ = False

    description: TestbedDescription
    prefix: str

    def namespace(self, name: str) -> str:
        """The network namespace of a node or switch."""
        return self.prefix + name

    def address(self, node: str) -> str:
        """The IP address of a node."""
        return _address(list(self.description.by_name).index(node))

    def entering(self, node: str) -> Command:
        """What to put before a command so that it runs on a node, whose name is its host name."""
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', node)
        return ("ip", "netns", "exec", self.namespace(node), *named)


def unavailable_reason() -> str | None:
    """Why no testbed can be built here, or None."""
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        return f"a testbed needs the command {missing[0]}, which is not here; install it"
    if os.geteuid() != 0:
        return "a testbed needs root, for network namespaces; run as root"
    return None


@contextlib.contextmanager
def testbed(description: TestbedDescription) -> Iterator[Testbed]:
    """A testbed that is up within the block; raises ProbeError where none can be built."""
    reason = unavailable_reason()
    if reason is not None:
        raise ProbeError(reason)
    remove_stale()
    bed = Testbed(description=description, prefix=f"tb{os.getpid()}x{next(_count)}-")
    try:
        for command in build_commands(description, bed.prefix):
            run_command(command)
        yield bed
    finally:
        remove(bed.prefix)


def build_commands(description: TestbedDescription, prefix: str) -> list[Command]:
    """Every command that builds the testbed, in order."""
    commands: list[Command] = []
    for switch in (SPINE, *description.racks):
        commands += [
            ("ip", "netns", "add", prefix + switch),
            *_ip(prefix + switch, "link add br0 type bridge", "link set dev br0 up"),
        ]
    for rack, uplink in description.racks.items():
        commands += _cable(prefix, SPINE, rack, "uplink", uplink)
        commands += _ip(prefix + rack, "link set dev uplink master br0")
    for number, node in enumerate(description.nodes):
        namespace = prefix + node.name
        commands.append(("ip", "netns", "add", namespace))
        commands += _cable(
            prefix, node.rack or SPINE, node.name, INTERFACE, node.uplink_bytes_per_s
        )
        commands += _ip(
            namespace,
            "link set dev lo up",
            f"address add {_address(number)}/16 dev {INTERFACE}",
            # The default may be BBR, which probes for bandwidth and so makes equal runs unlike.
            f"route replace {_NETWORK}.0.0/16 dev {INTERFACE} congctl cubic",
        )
    return commands


def _cable(prefix: str, upper: str, lower: str, lower_end: str, rate: float) -> list[Command]:
    """A veth pair from a port of the switch `upper` to `lower`, limited at both ends."""
    above, below = prefix + upper, prefix + lower
    commands = _ip(
        below,
        f"link add {lower_end} type veth peer name {lower} netns {above}",
        _fitting(lower_end, rate),
        f"link set dev {lower_end} up",
    )
    commands += _ip(above, f"link set dev {lower} master br0", f"link set dev {lower} up")
    for namespace, end in ((below, lower_end), (above, lower)):
        commands.append(limit_command(namespace, end, rate))
    return commands


def _fitting(interface: str, rate: float) -> str:
    # A packet larger than the bucket is cut up by tbf, at a price: let TCP make fitting ones.
    return f"link set dev {interface} gso_max_size {min(65536, _burst_bytes(rate) // 2)}"


def limit_command(namespace: str, interface: str, bytes_per_s: float) -> Command:
    """The command that lets an interface send at a line rate and no faster."""
    shape = f"rate {round(8 * bytes_per_s)}bit burst {_burst_bytes(bytes_per_s)}"
    qdisc = f"qdisc replace dev {interface} root tbf {shape} limit {_QUEUE_BYTES}"
    return ("tc", "-n", namespace, *qdisc.split())


def _burst_bytes(bytes_per_s: float) -> int:
    return round(min(max(_BURST_S * bytes_per_s, _LEAST_BURST_BYTES), _MOST_BURST_BYTES))


def _ip(namespace: str, *commands: str) -> list[Command]:
    return [("ip", "-n", namespace, *command.split()) for command in commands]


def _address(number: int) -> str:
    return f"{_NETWORK}.{number // 250}.{number % 250 + 1}"


def run_command(command: Sequence[str]) -> str:
    """Run one command to its end; its output. Raises ProbeError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ProbeError(
            f"building the testbed failed at '{' '.join(command)}', which said: {said}; check "
            "that the kernel has network namespaces, veth, bridges and tbf"
        )
    return done.stdout


def set_uplink(bed: Testbed, node: str, bytes_per_s: float) -> None:
    """Give a node's link another line rate, in both directions, while it is in use."""
    upper = bed.description.by_name[node].rack or SPINE
    for command in _ip(bed.namespace(node), _fitting(INTERFACE, bytes_per_s)):
        run_command(command)
    for namespace, interface in ((node, INTERFACE), (upper, node)):
        run_command(limit_command(bed.namespace(namespace), interface, bytes_per_s))


def set_link_state(bed: Testbed, node: str, *, up: bool) -> None:
    """Pull a node's cable, or plug it in again."""
    upper = bed.description.by_name[node].rack or SPINE
    state = "up" if up else "down"
    run_command(("ip", "-n", bed.namespace(upper), "link", "set", "dev", node, state))


def namespaces() -> list[str]:
    """Names of all network namespaces on this machine."""
    listed = run_command(("ip", "netns", "list")).splitlines()
    return [line.split()[0] for line in listed if line]


def remove_stale() -> list[str]:
    """Remove what testbeds left behind whose owner has died; the prefixes removed."""
    found = {match[1]: int(match[2]) for match in map(_PREFIX.fullmatch, namespaces()) if match}
    stale = [prefix for prefix, owner in found.items() if not os.path.exists(f"/proc/{owner}")]
    for prefix in stale:
        remove(prefix)
    return stale


def remove(prefix: str) -> None:
    """Remove the namespaces with a prefix, and end what still runs in them."""
    names = [name for name in namespaces() if name.startswith(prefix)]
    for name in names:
        # Another process may be removing the same stale testbed.
        with contextlib.suppress(ProbeError):
            for pid in run_command(("ip", "netns", "pids", name)).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
    for name in names:
        with contextlib.suppress(ProbeError):
            run_command(("ip", "netns", "delete", name))
    deadline = time.monotonic() + 5.0
    while left := [name for name in namespaces() if name.startswith(prefix)]:
        if time.monotonic() > deadline:
            raise ProbeError(f"cannot remove {left[0]}; 'ip netns delete {left[0]}' does")
        time.sleep(0.01)
