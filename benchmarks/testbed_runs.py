"""Begin a benchmark on testbeds: its folder, its records, the probes of the host and a network."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from records import Records, say
from testbed.launch import launch
from testbed.network import Testbed, unavailable_reason

from estimator.machines.catalogue import load_profile

MACHINE = "testbed"


def add_options(
    parser: argparse.ArgumentParser, folder: str, *, probe_budget_s: float = 45.0
) -> None:
    """What every benchmark on testbeds takes; results are kept in `folder` of ``build/``."""
    add = parser.add_argument
    add("--work", type=Path, default=Path("build", folder), help="where results are kept")
    add("--profile", type=Path, help="a profile of this machine, instead of probing it")
    add("--probe-budget", type=float, default=probe_budget_s, help="seconds to probe a network")
    add("--json", action="store_true", help="one JSON object on stdout instead of the tables")


def open_work(options: argparse.Namespace) -> Records:
    """The records of the folder `options.work`, which is made, with the host's profile in it.

    Raises SystemExit where there can be no testbed.
    """
    if reason := unavailable_reason():
        raise SystemExit(f"no testbed here: {reason}")
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ["ESTIMATOR_HOME"] = str(options.work / "home")
    kept = options.work / "host.json"
    if options.profile:
        load_profile(str(options.profile.resolve())).save(kept)
    elif not kept.exists():
        from estimator.probe.machine import probe_machine

        say("probing this machine")
        probe_machine(name=MACHINE).save(kept)
    options.profile = kept
    return Records(options.work / "records.jsonl")


def probe_network(
    bed: Testbed,
    allocation: str,
    options: argparse.Namespace,
    out: Path,
    *,
    base: Path | None = None,
    cluster: Path | None = None,
    all_pairs: bool = False,
) -> None:
    """Probe the ranks of an allocation together, from the profile `base`, by default the host's."""
    say(f"probing the network for {out.stem}")
    command = [sys.executable, "-m", "estimator.probe", "--name", MACHINE]
    command += ["--budget", str(options.probe_budget), "--out", str(out)]
    command += ["--base", str(base or options.profile)]
    command += ["--cluster", str(cluster)] if cluster else []
    command += ["--pairs", "all"] if all_pairs else []
    launch(bed, allocation, command)
