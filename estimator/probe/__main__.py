"""Probe several nodes together: ``torchrun --nnodes N --nproc-per-node D -m estimator.probe``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import socket
import sys
from pathlib import Path

import click

from estimator.errors import EstimatorError, ProbeError, sentence, spelt_out
from estimator.files import check_writable, home
from estimator.machines.catalogue import check_machine_name, load_profile
from estimator.machines.profile import DeviceKind, MachineProfile
from estimator.placement.topology import Cluster
from estimator.probe.cluster.cluster_probe import ClusterRequest, probe_cluster
from estimator.probe.cluster.discovery import Place, discover
from estimator.probe.cluster.rank import take_part
from estimator.probe.machine import probe_machine
from estimator.probe.option_types import Duration

WRONG_INPUT, INTERRUPTED = 2, 130


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--name",
    default="local",
    show_default=True,
    callback=lambda *given: check_machine_name(given[-1]),
    help="What to call the machine type.",
)
@click.option("--out", type=click.Path(path_type=Path), help="File to write, not the user's store.")
@click.option(
    "--budget",
    type=Duration(1.0, 1e6, counts_seconds=True),
    default=60.0,
    help="Time to spend, such as 5min; default 60s.",
)
@click.option("--base", help="Profile with the machine's own numbers: a name or a file.")
@click.option("--pairs", type=click.Choice(["classes", "all"]), help="Default: all up to 16 nodes.")
@click.option(
    "--cluster", type=click.Path(path_type=Path), help="Cluster file that names the racks."
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def probe(
    name: str,
    out: Path | None,
    budget: float,
    base: str | None,
    pairs: str | None,
    cluster: Path | None,
    as_json: bool,
) -> None:
    """Measure the network between nodes; every rank of a launcher runs this.

    Rank 0 writes the profile. When a rank is lost, the budget is over or it is interrupted, it ends
    with what it has, and says what is missing. Ranks on several hosts need one secret for all, in
    ESTIMATOR_PROBE_SECRET or in the file that ESTIMATOR_PROBE_SECRET_FILE names; ranks of one host
    without one have it probed as 'estimator probe' does.
    """
    place = discover(os.environ)
    if place is None:
        raise ProbeError(
            "no launcher started this; use torchrun, the command that 'estimator probe --launch' "
            "prints, or 'estimator probe' for this machine alone"
        )
    if place.secret is None and place.rank != 0:
        return  # All ranks are on one machine, which rank 0 probes as 'estimator probe' does.
    kind: DeviceKind | None = "cpu" if name == "local-cpu" else None
    if place.rank != 0:
        # Rank 0 knows the reason; a failing code would have the launcher stop all other ranks.
        reason = take_part(place, host=socket.gethostname(), versions=versions(), kind=kind)
        if reason:
            _tell(f"estimator: {reason}")
        return
    request = ClusterRequest(
        name=name,
        budget_s=budget,
        base=load_profile(base) if base else None,
        cluster=Cluster.load(cluster) if cluster else None,
        all_pairs=None if pairs is None else pairs == "all",
    )
    path = out or home() / "machines" / f"{name}.json"
    check_writable(path)
    if place.secret is None:
        if base is not None:
            raise ProbeError(
                "all ranks are on one machine, which is probed whole; leave out --base, or give "
                "the ranks a secret to measure between them"
            )
        profile = _probe_alone(name, place.world_size, budget, kind)
        profile.save(path)
    else:
        profile = _lead(place, request, path)
    if as_json:
        click.echo(json.dumps(profile.to_dict(), indent=1, allow_nan=False))
    else:
        click.echo(str(path))


def _probe_alone(
    name: str, devices: int, budget_s: float, kind: DeviceKind | None
) -> MachineProfile:
    """The one machine of all ranks; what it has when it is interrupted."""
    progress = _Progress()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    profile = probe_machine(
        name=name,
        devices=devices,
        budget_s=budget_s,
        kind=kind,
        report=progress.report,
        say=progress.say,
    )
    progress.end()
    return profile


def _lead(place: Place, request: ClusterRequest, path: Path) -> MachineProfile:
    progress, signals = _Progress(), list[int]()
    # SIGTERM comes where a launcher stops all ranks because one has failed; either may come twice.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda number, _frame: signals.append(number))
    profile = probe_cluster(
        place,
        request,
        host=socket.gethostname(),
        versions=versions(),
        probe_machine=probe_machine,
        report=progress.report,
        say=progress.say,
        is_called_off=lambda: bool(signals),
    )
    progress.end()
    profile.save(path)
    return profile


def versions() -> dict[str, str]:
    """What must be equal on all nodes for them to work together."""
    named = {"python": platform.python_version()}
    for name, package in (("estimator", "throughput-estimator"), ("torch", "torch")):
        try:
            named[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            named[name] = "unknown"
    import torch

    if torch.cuda.is_available():
        named["nccl"] = ".".join(str(number) for number in torch.cuda.nccl.version())
    return named


class _Progress:
    """Lines on stderr: the part under way rewrites its own, sentences stay."""

    def __init__(self) -> None:
        self._part, self._line, self._on_terminal = "", "", sys.stderr.isatty()

    def report(self, part: str, done_ratio: float) -> None:
        """Say how far it is: on a terminal all the time, in a file once per part."""
        line = f"{100 * done_ratio:3.0f} % {part}"
        if self._on_terminal and line != self._line:
            click.echo(f"\r{spelt_out(line):60}", nl=False, err=True)
        elif not self._on_terminal and part != self._part:
            _tell(line)
        self._part, self._line = part, line

    def say(self, words: str) -> None:
        """A sentence on a line of its own."""
        self.end()
        _tell(f"estimator: {words}")

    def end(self) -> None:
        """Leave the line of the progress."""
        if self._on_terminal:
            click.echo(err=True)


def _tell(text: str) -> None:
    """A line on stderr; names that other ranks sent move no cursor."""
    click.echo(sentence(text), err=True)


def run() -> int:
    """Run the command; its exit code. Wrong input ends with one sentence on stderr and code 2."""
    try:
        return int(probe.main(prog_name="python -m estimator.probe", standalone_mode=False) or 0)
    except click.ClickException as error:
        _tell(f"estimator: {error.format_message()}")
    except EstimatorError as error:
        _tell(f"estimator: {error}")
    except (click.Abort, KeyboardInterrupt):
        click.echo("estimator: interrupted", err=True)
        return INTERRUPTED
    return WRONG_INPUT


def main() -> None:
    """Run the command and end this process."""
    code = run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch's store may still run after an error, and would abort an orderly exit.
    os._exit(code)


if __name__ == "__main__":
    main()
