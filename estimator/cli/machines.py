"""Measure machines, and show, compare, merge and import their profiles."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from estimator.cli.console import (
    end_with_no,
    json_option,
    print_json,
    print_sections,
    print_text,
    progress,
    remark,
)
from estimator.cli.option_types import Count, Duration
from estimator.cli.options import OutFile
from estimator.errors import ProbeError, ProfileError, UnknownMachineError
from estimator.units import format_ratio

if TYPE_CHECKING:
    from estimator.machines.profile import MachineProfile
    from estimator.probe.cluster.cluster_probe import ClusterRequest
    from estimator.probe.cluster.discovery import Place


def _machine_name(context: click.Context, option: click.Parameter, name: str | None) -> str | None:
    from estimator.machines.catalogue import check_machine_name

    return None if name is None else check_machine_name(name)


@click.command(epilog="Example: estimator probe --name local --budget 5min")
@click.option("--name", default="local", callback=_machine_name, help="What to call this machine.")
@click.option("--devices", type=Count(), help="How many core groups of the CPU, or GPUs.")
@click.option("--out", type=click.Path(path_type=Path), help="File to write, not the user's store.")
@click.option(
    "--budget",
    type=Duration(1.0, 1e6, counts_seconds=True),
    default=60.0,
    help="Spend at most this time, such as 5min; default 60s.",
)
@click.option("--thorough", is_flag=True, help="Measure more sizes; takes several budgets.")
@click.option("--strict", is_flag=True, help="Refuse a machine that other programs keep busy.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
@click.option("--together", is_flag=True, help="Be one of the ranks that a launcher starts.")
@click.option("--base", help="With --together: profile with the machine's own numbers.")
@click.option(
    "--pairs",
    type=click.Choice(["classes", "all"]),
    help="With --together: of nodes; default all up to 16.",
)
@click.option(
    "--cluster",
    type=click.Path(path_type=Path),
    help="With --together: cluster file that names the racks.",
)
def probe(
    name: str,
    devices: int | None,
    out: Path | None,
    budget: float,
    thorough: bool,
    strict: bool,
    as_json: bool,
    together: bool,
    base: str | None,
    pairs: str | None,
    cluster: Path | None,
) -> None:
    """Measure this machine and keep the profile under its name.

    Interrupted by Ctrl-C it keeps what it has and says what is missing; a complete profile is not
    replaced by one that was cut short (exit code 1). It waits a quarter of the budget for other
    programs to end; what they disturb after that is marked, and intervals are wider for it.

    Several nodes are probed together by 'torchrun -m estimator.probe' on each, which is
    --together. Rank 0 writes the profile; when a rank is lost, the budget is over or it is
    interrupted, it ends with what it has. Ranks need one secret, in
    ESTIMATOR_PROBE_SECRET.
    """
    from estimator.files import home

    path = out or home() / "machines" / f"{name}.json"
    if together:
        if devices or thorough or strict:
            raise click.UsageError("--devices, --thorough and --strict go with one machine alone")
        _probe_together(name, path, budget, as_json, base=base, pairs=pairs, cluster=cluster)
        return
    if base or pairs or cluster:
        raise click.UsageError("--base, --pairs and --cluster go with --together")
    _probe_alone(name, devices, path, budget, as_json, thorough=thorough, strict=strict)


def _probe_alone(
    name: str,
    devices: int | None,
    path: Path,
    budget_s: float,
    as_json: bool,
    *,
    thorough: bool,
    strict: bool,
) -> None:
    from estimator.files import check_writable

    check_writable(path)
    from estimator.probe.machine import probe_machine

    earlier = _profile_at(path)
    with progress("probing") as report:
        profile = probe_machine(
            name=name,
            devices=devices,
            budget_s=budget_s,
            thorough=thorough,
            report=report,
            # 'local-cpu' means this machine's cores, whatever else it has.
            kind="cpu" if name == "local-cpu" else None,
            strict=strict,
            earlier=earlier,
            say=remark,
        )
    if profile.is_cut and earlier is not None and not earlier.is_cut:
        end_with_no(
            f"only {_timed(profile)} of the kernel calls were timed, so {path} keeps the complete "
            "profile that it has; give more --budget, or another --name"
        )
    profile.save(path)
    _say_what_is_missing(profile)
    if as_json:
        print_json(profile.to_dict())
    else:
        print_text(f"{path}: {len(profile.devices)} x {profile.devices[0].name}")


def _probe_together(
    name: str,
    path: Path,
    budget_s: float,
    as_json: bool,
    *,
    base: str | None,
    pairs: str | None,
    cluster: Path | None,
) -> None:
    """One rank's part of a probe of several nodes."""
    from estimator.files import check_writable
    from estimator.machines.catalogue import load_profile
    from estimator.placement.topology import Cluster
    from estimator.probe.cluster.cluster_probe import ClusterRequest
    from estimator.probe.cluster.discovery import discover
    from estimator.probe.cluster.rank import take_part

    place = discover(os.environ)
    if place is None:
        raise ProbeError(
            "no launcher started this; use torchrun, or 'estimator probe' for this machine alone"
        )
    if place.rank != 0:
        # Rank 0 knows why it refuses; a failing code would have the launcher stop all other ranks.
        remark(take_part(place, kind="cpu" if name == "local-cpu" else None))
        return
    request = ClusterRequest(
        name=name,
        budget_s=budget_s,
        base=load_profile(base) if base else None,
        cluster=Cluster.load(cluster) if cluster else None,
        all_pairs=None if pairs is None else pairs == "all",
    )
    check_writable(path)
    profile = _lead(place, request)
    profile.save(path)
    if as_json:
        print_json(profile.to_dict())
    else:
        print_text(str(path))


def _lead(place: Place, request: ClusterRequest) -> MachineProfile:
    """Rank 0's part, until all is measured or a signal ends it."""
    from estimator.probe.cluster.cluster_probe import probe_cluster
    from estimator.probe.machine import probe_machine

    signals: list[int] = []
    # SIGTERM comes where a launcher stops all ranks because one has failed; either may come twice.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda number, _frame: signals.append(number))
    with progress("probing", in_lines=True) as report:
        return probe_cluster(
            place,
            request,
            probe_machine=probe_machine,
            report=report,
            say=remark,
            is_called_off=lambda: bool(signals),
        )


def _say_what_is_missing(profile: MachineProfile) -> None:
    if profile.missing:
        print_text(f"not measured: {'; '.join(profile.missing)}", err=True)
    if profile.interference is not None and profile.interference.matters:
        remark(f"{profile.interference} meanwhile: intervals are wider for it")
    if profile.device_faults:
        remark(f"{'; '.join(profile.device_faults)}; mend that and probe again")
    if profile.is_cut:
        timed = _timed(profile)
        remark(f"only {timed} of the kernel calls were timed; give more --budget")


def _timed(profile: MachineProfile) -> str:
    return format_ratio(profile.kernels_timed_ratio or 0.0)


def _profile_at(path: Path) -> MachineProfile | None:
    from estimator.machines.catalogue import load_profile

    try:
        return load_profile(path)
    except (ProfileError, UnknownMachineError):  # none yet, or a damaged one
        return None


@click.group()
def machines() -> None:
    """List, show, compare, merge and import machine profiles."""


@machines.command("list", epilog="Example: estimator machines list")
@json_option
def list_machines(as_json: bool) -> None:
    """Every machine that can be named in an allocation, measured ones first."""
    from estimator.files import home
    from estimator.machines.catalogue import known_machines, load_profile
    from estimator.report.profiles import machines_sections

    profiles: dict[str, tuple[Path, MachineProfile | None]] = {}
    for name, path in known_machines().items():
        try:
            profiles[name] = (path, load_profile(path))
        except (ProfileError, UnknownMachineError):  # damaged, or a link that leads nowhere
            profiles[name] = (path, None)
    if as_json:
        print_json({"machines": [_listed(name, *entry) for name, entry in profiles.items()]})
        return
    print_sections(machines_sections(profiles, store=home()))
    if not any(path.is_relative_to(home()) for path, _ in profiles.values()):
        print_text("none of them was measured here; run 'estimator probe' to measure this machine")


def _listed(name: str, path: Path, profile: MachineProfile | None) -> dict[str, Any]:
    """What the list says of a machine; of a damaged one only where it is."""
    if profile is None:
        return {"name": name, "path": str(path), "damaged": True}
    device = profile.devices[0]
    return {
        "name": name,
        "path": str(path),
        "damaged": False,
        "device": device.name,
        "devices": len(profile.devices),
        "kind": profile.kind,
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
        "peak_flops_per_s": dict(device.peak_flops_per_s),
        "hardware": dict(profile.hardware),
        "source": profile.provenance.source,
        "at": profile.provenance.at,
    }


@machines.command(epilog="Example: estimator machines show h100-sxm")
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """What was measured of the machine NAME (or of a profile file)."""
    from estimator.machines.catalogue import load_profile

    profile = load_profile(name)
    if as_json:
        print_json(profile.to_dict())
        return
    from estimator.report.profiles import profile_sections

    print_sections(profile_sections(profile))


@machines.command(epilog="Example: estimator machines compare h100-sxm a100-sxm-80gb")
@click.argument("names", nargs=-1, required=True, metavar="NAME_OR_FILE...")
@json_option
def compare(names: tuple[str, ...], as_json: bool) -> None:
    """Every number of two machines, and the ratio of those that both have: second over first.

    Of three and more, how long each takes beside the usual one, and which is the odd one.

    Exit code 1: one is odd.
    """
    from estimator.machines.catalogue import load_profile
    from estimator.machines.comparison import compare_several
    from estimator.report.profiles import comparison_section, several_section

    if len(names) < 2 or len(set(names)) < len(names):
        raise click.UsageError("name two machines or more, each once")
    profiles = {name: load_profile(name) for name in names}
    if len(names) == 2:
        one, other = profiles.values()
        if as_json:
            print_json(_compared(one, other))
        else:
            print_sections([comparison_section(one, other)])
        return
    rows = compare_several(profiles)
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        print_sections([several_section(rows, profiles)])
    odd = dict.fromkeys(row.machine for row in rows if row.is_odd)
    if odd:
        end_with_no(f"{', '.join(odd)} is odd among these machines")


def _compared(first: MachineProfile, second: MachineProfile) -> dict[str, Any]:
    from estimator.machines.comparison import (
        compare_profiles,
        disturbed_groups,
        median_difference_ratio,
        only_in,
    )
    from estimator.machines.typical import with_typical_costs

    one, other = with_typical_costs(first), with_typical_costs(second)
    common = compare_profiles(one, other)
    return {
        "first": first.name,
        "second": second.name,
        "median_difference_ratio": median_difference_ratio(common) if common else None,
        "common": [asdict(row) | {"ratio": row.ratio} for row in common],
        "only_in_first": [asdict(row) for row in only_in(one, other)],
        "only_in_second": [asdict(row) for row in only_in(other, one)],
        "usual_host_and_updates": [
            profile.name
            for profile, completed in ((first, one), (second, other))
            if completed is not profile
        ],
        "disturbed": [
            asdict(profile.interference)
            | {
                "name": profile.name,
                "relative_error": profile.interference.relative_error,
                "groups": groups,
            }
            for profile in (first, second)
            if profile.interference is not None and (groups := disturbed_groups(profile))
        ],
    }


@machines.command(epilog="Example: estimator machines schema")
def schema() -> None:
    """Print the JSON Schema of a profile file, to check or write one with other tools.

    Numbers are in the base units that their names end with: seconds, bytes, bytes per second.
    """
    from estimator.machines.profile import json_schema

    print_json(json_schema())


_files_argument = click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="FILE...",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
)


@machines.command("import", epilog="Example: estimator machines import a.json --name mine")
@_files_argument
@click.option("--into", metavar="NAME", help="Add to this machine's profile.")
@click.option("--name", callback=_machine_name, help="What to call a new machine.")
@click.option("--out", type=OutFile(), help="File to write, not the user's store.")
def import_profile(
    files: tuple[Path, ...], into: str | None, name: str | None, out: Path | None
) -> None:
    """Read what other tools measured: nvbandwidth --json, nccl-tests (text or -J), perftest,
    NCCL_TOPO_DUMP_FILE, nvidia-smi topo -m, Slurm topology.conf and topology.yaml.

    Measured numbers of a profile stay. A Slurm topology becomes a cluster file, printed or written
    to --out, whose nodes are machines called --name.
    """
    from estimator.files import home, write_text_atomically
    from estimator.machines.catalogue import known_machines, load_profile
    from estimator.placement.topology import cluster_toml
    from estimator.probe.imports.files import read_imports
    from estimator.probe.imports.findings import add_imports, profile_of_imports, unlisted_devices

    imported = read_imports(files, machine=name or "local")
    if imported.cluster is not None:
        text = cluster_toml(imported.cluster)
        if out is None:
            print_text(text)
            return
        write_text_atomically(out, text)
        print_text(f"{out}: {len(imported.cluster.nodes)} nodes of '{name or 'local'}'")
        return
    if (into is None) == (name is None):
        raise click.UsageError("say --into NAME to add to a profile, or --name NAME for a new one")
    if into is not None:
        machine = load_profile(into)
        profile = add_imports(machine, imported)
        if unlisted := unlisted_devices(machine, imported):
            remark(unlisted)
        default = home() / "machines" / f"{into}.json" if into in known_machines() else Path(into)
    else:
        if out is None and name in known_machines():
            raise click.UsageError(f"'{name}' is known already; use --into {name}, or --out FILE")
        profile = profile_of_imports(imported, name=name or "")
        default = home() / "machines" / f"{name}.json"
    profile.save(out or default)
    print_text(f"{out or default}: {', '.join(dict.fromkeys(imported.formats))}")


@machines.command(epilog="Example: estimator machines merge a.json b.json --out both.json")
@click.argument("names", nargs=-1, required=True, metavar="NAME_OR_FILE...")
@click.option("--out", type=OutFile(), required=True, help="File to write.")
def merge(names: tuple[str, ...], out: Path) -> None:
    """Join profiles of one machine type, named or in files: later ones add what earlier ones lack.

    Of two measurements of the same thing the better source wins, then the newer one.
    """
    from estimator.machines.catalogue import load_profile
    from estimator.machines.merging import merge_profiles

    # A file of this folder may have the name of a machine.
    places = (str(Path(name).absolute()) if Path(name).is_file() else name for name in names)
    profile = merge_profiles([load_profile(place) for place in places])
    profile.save(out)
    print_text(f"{out}: {len(names)} profiles of {profile.devices[0].name}")
