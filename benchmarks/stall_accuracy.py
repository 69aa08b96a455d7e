"""Compare stalls with what was put in, and predicted steps with data with what they take.

``injected``: costs put into a real script against the stalls reported of it; with root also reads
of a throttled disk and the link between two namespaces. ``loaders``: six kinds of data with 0, 1
and 2 workers, the step without data (measured) and the loader measured alone against the step with
data. ``cached``: shares of the data in the page cache, the rest on a throttled disk.
``exchange``: the interconnect stall of two gloo ranks for 10 to 200 tensors of equal bytes in all,
and for equal tensors of 1 to 100 MB in all, bucketed or not, predicted from the probed profile.

What is found is appended to a file, from which a further run continues. Needs a quiet machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

from control_groups import control_group, join
from options import Options, local_machine
from records import Record, Records, say
from stall_scripts.exchange import layers
from stall_scripts.injected import BATCH, FILE_BYTES, GRADIENT_BYTES, write_files
from stall_scripts.loaders import BATCH as DATA_BATCH
from stall_scripts.loaders import KINDS, write_data
from summary import milliseconds
from testbed.description import TestbedDescription
from testbed.network import INTERFACE, testbed, unavailable_reason

import estimator as est
from estimator.estimates.request import EstimateRequest
from estimator.machines.catalogue import load_profile
from estimator.probe.devices.storage import evict, load, read_bytes_per_s
from estimator.timeline.rank.lanes import input_costs
from estimator.waits.measured import MeasuredStalls, StallName, measure_stalls
from estimator.waits.predicted import CACHED_RATIOS, predict_stalls
from estimator.waits.runs import Script, cores_of
from estimator.waits.runs import run as run_script
from estimator.workload.loader import Loader

SCRIPTS = Path(__file__).parent / "stall_scripts"


class Case(NamedTuple):
    """A name and what measures it: seconds expected and found, and how far they may differ.

    They differ by no more than `of_value` of what was expected or `of_step` of `step_s`.
    """

    name: str
    measure: Callable[[], Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """How often and how long scripts run; what several cases need is measured once."""

    steps: int
    repeats: int
    folder: Path
    known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def script(self, name: str, arguments: Sequence[object], *, devices: int = 1) -> Script:
        """A script of the benchmarks on cores of this machine."""
        return Script(
            path=SCRIPTS / name,
            arguments=tuple(map(str, arguments)),
            cores=cores_of(f"1x{devices}:local"),
            steps=self.steps,
        )

    def step_s(self, script: Script, *, is_synthetic: bool, devices: int = 0) -> float:
        """The median step of several runs, on all of the script's devices or on some."""
        key = (script, is_synthetic, devices)
        if key not in self.known:
            with tempfile.TemporaryDirectory() as folder:
                self.known[key] = median(
                    run_script(
                        script,
                        Path(folder),
                        devices=devices or len(script.cores),
                        is_synthetic=is_synthetic,
                    ).step_s
                    for _ in range(self.repeats)
                )
        return self.known[key]


def loader_of(script: Script) -> Loader:
    """The loader of a script, measured on its cores with as many threads as these."""
    (cores,) = script.cores
    command = [sys.executable, str(script.path), *script.arguments, "loader"]
    found = subprocess.run(
        ["taskset", "-c", ",".join(map(str, cores)), *command],
        env={**os.environ, "OMP_NUM_THREADS": str(len(cores))},
        capture_output=True,
        text=True,
        check=True,
    )
    return Loader(**json.loads(found.stdout))


def predicted_s(loader: Loader, without_s: float, samples: int) -> float:
    """The step with a loader of one that takes `without_s` without, on the probed machine."""
    profile = load_profile("local")
    costs = input_costs(loader, profile, samples=samples, batches=1, ranks_per_node=1)
    return float(without_s + costs.stall_s(without_s))


@contextlib.contextmanager
def throttled(folder: Path, bytes_per_s: float) -> Iterator[None]:
    """Let this process and its children read the disk under `folder` at a rate and no faster.

    By a control group of version 1 (blkio.throttle.read_bps_device); what is in the page cache is
    no read of the disk. The kernel lets a tenth of a second's bytes through at once, so the disk
    works while a step computes, as if somebody read ahead: in the long run a step takes the longer
    of its own time and the disk's. Raises ProbeError where there is no such group.
    """
    device = os.stat(folder).st_dev
    limit = f"{os.major(device)}:{os.minor(device)} {round(bytes_per_s)}"
    limits = {"blkio.throttle.read_bps_device": limit}
    with control_group("blkio", f"stalls{os.getpid()}", limits) as group:
        join(group)
        try:
            yield
        finally:
            join(group.parent)


# Costs put into a script

DISK_BYTES_PER_S = 5e6
LINK = "200 Mbit/s"
# Bytes of an Ethernet frame, of which TCP's payload is the rest, at an MTU of 1500 with timestamps.
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
# What a step is longer by that waits for nothing.
HIDDEN_RATIO = 0.03


def injected(bench: Bench) -> Iterator[Case]:
    """Each cost against the stall reported: within 10 % of it or 2 % of the step."""
    for what, seconds in (("sleep", 0.002), ("sleep", 0.010), ("work", 0.002), ("work", 0.010)):
        name = f"{what} {1e3 * seconds:g} ms a sample"
        yield Case(name, partial(_prep, bench, what, seconds, workers=0))
    yield Case("sleep 4 ms a sample, 2 workers", partial(_prep, bench, "sleep", 0.004, workers=2))
    yield Case("wire 10 ms a million bytes", partial(_wire, bench, 0.010))
    if reason := unavailable_reason():
        say(reason)
        return
    yield Case(f"cold files at {DISK_BYTES_PER_S / 1e6:g} MB/s", partial(_fetch, bench))
    yield Case(f"two nodes at {LINK}", partial(_network, bench))
    yield Case("parts against a repeated full run", partial(_sum, bench))


def _beside(found: MeasuredStalls, stall: StallName, expected_s: float, **more: float) -> Record:
    """A stall beside what it should be; `plain_s` is that of the script without the cost."""
    return {
        "predicted_s": expected_s,
        "measured_s": found.stalls[stall].stall_s - more.get("plain_s", 0.0),
        "low_s": found.stalls[stall].low_s,
        "high_s": found.stalls[stall].high_s,
        "step_s": found.runs[_RUNS[stall]].step_s,
        "runs": {name: each.runs_s for name, each in found.runs.items()},
        "of_value": 0.10,
        "of_step": 0.02,
        **more,
    }


_RUNS = {"prep": "T3", "fetch": "T2", "interconnect": "T1", "network": "T5"}


def _prep(bench: Bench, what: str, seconds: float, workers: int) -> Record:
    script = bench.script("injected.py", [what, seconds, workers])
    found = measure_stalls(script, repeats=bench.repeats)
    if workers:  # a step hides it all
        return _beside(found, "prep", 0.0, of_step=HIDDEN_RATIO)
    # Making a batch takes a little without the cost as well.
    plain = bench.script("injected.py", ["none", 0, 0])
    plain_s = bench.step_s(plain, is_synthetic=False) - bench.step_s(plain, is_synthetic=True)
    return _beside(found, "prep", BATCH * seconds, plain_s=plain_s)


def _wire(bench: Bench, seconds: float) -> Record:
    found = measure_stalls(
        bench.script("injected.py", ["wire", seconds, 0], devices=2), repeats=bench.repeats
    )
    plain = bench.script("injected.py", ["none", 0, 0], devices=2)
    alone_s = bench.step_s(plain, is_synthetic=True, devices=1)
    plain_s = bench.step_s(plain, is_synthetic=True) - alone_s
    return _beside(found, "interconnect", seconds * GRADIENT_BYTES / 1e6, plain_s=plain_s)


def _fetch(bench: Bench) -> Record:
    with _reading(bench, devices=1) as (script, _):
        found = measure_stalls(script, repeats=bench.repeats)
    disk_s = BATCH * FILE_BYTES / DISK_BYTES_PER_S
    return _beside(found, "fetch", max(disk_s - found.runs["T3"].step_s, 0.0))


@contextlib.contextmanager
def _reading(bench: Bench, *, devices: int) -> Iterator[tuple[Script, list[Path]]]:
    """A script that reads files, each once in a run, of a throttled disk; and the files."""
    folder = bench.folder / f"files{devices}"
    files = write_files(folder, BATCH * bench.steps * devices)
    with throttled(folder, DISK_BYTES_PER_S):
        yield bench.script("injected.py", ["wire", 0.010, 0, folder], devices=devices), files


def _network(bench: Bench) -> Record:
    """Of two ranks each sends as many bytes as it has gradients, half of them in each phase."""
    description = TestbedDescription.uniform(nodes=2, devices=1, uplink=LINK)
    with testbed(description) as bed:
        commands = tuple(
            shlex.join([*bed.entering(node.name), "env", f"GLOO_SOCKET_IFNAME={INTERFACE}"])
            for node in description.nodes
        )
        script = replace(
            bench.script("injected.py", ["none", 0, 0], devices=2),
            node_commands=commands,
            address=bed.address("n0"),
        )
        found = measure_stalls(script, repeats=bench.repeats)
    rate = description.nodes[0].uplink_bytes_per_s
    wire_s = GRADIENT_BYTES * FRAME_BYTES / PAYLOAD_BYTES / rate
    # The wire takes the place of what the ranks waited for each other inside the node.
    return _beside(found, "network", wire_s - found.stalls["interconnect"].stall_s)


def _sum(bench: Bench) -> Record:
    """One device's step and all stalls of two, against further runs with everything in them."""
    again_s = []
    with _reading(bench, devices=2) as (script, files), tempfile.TemporaryDirectory() as folder:
        found = measure_stalls(script, repeats=bench.repeats)
        for _ in range(bench.repeats):
            evict(files)
            full = run_script(script, Path(folder), devices=2, is_synthetic=False)
            again_s.append(full.step_s)
    parts: tuple[StallName, ...] = ("interconnect", "prep", "fetch")
    parts_s = {name: found.stalls[name].stall_s for name in parts}
    return {
        "predicted_s": found.runs["T0"].step_s + sum(parts_s.values()),
        "measured_s": median(again_s),
        "step_s": median(again_s),
        "runs": {name: each.runs_s for name, each in found.runs.items()} | {"again": again_s},
        "parts_s": parts_s,
        "of_value": 0.03,
    }


# Steps with data

CACHED_WORKERS = 2


def loaders(bench: Bench) -> Iterator[Case]:
    """Steps with data: within 25 %."""
    folder = bench.folder / "loaders"
    write_data(folder)
    for kind in KINDS:
        for workers in (0, 1, 2):
            yield Case(f"{kind}, {workers} workers", partial(_step, bench, kind, workers, folder))


def _step(bench: Bench, kind: str, workers: int, folder: Path) -> Record:
    # Copies of batches are made without workers.
    alone = bench.script("loaders.py", [kind, 0, folder])
    script = bench.script("loaders.py", [kind, workers, folder])
    without_s = bench.step_s(alone, is_synthetic=True)
    loader = loader_of(script)
    measured_s = bench.step_s(script, is_synthetic=False)
    return {
        "predicted_s": predicted_s(loader, without_s, DATA_BATCH),
        "measured_s": measured_s,
        "without_s": without_s,
        "loader": loader.to_dict(),
        "step_s": measured_s,
        "of_value": 0.25,
    }


def cached(bench: Bench) -> Iterator[Case]:
    """Steps that read a share of their files of a throttled disk: within 5 %."""
    if reason := unavailable_reason():
        say(reason)
        return
    # Twice the steps, since the disk is let through in slices of time.
    longer = replace(bench, steps=2 * bench.steps)
    for ratio in CACHED_RATIOS:
        name = f"{ratio:.0%} cached, {CACHED_WORKERS} workers"
        yield Case(name, partial(_cached, longer, ratio))


def _cached(bench: Bench, ratio: float) -> Record:
    folder = bench.folder / "shares"
    # Each file is read once, those of batches that workers make ahead as well.
    files = write_files(folder, BATCH * (bench.steps + 2 * CACHED_WORKERS))
    script = bench.script("injected.py", ["none", 0, CACHED_WORKERS, folder])
    without_s = bench.step_s(bench.script("injected.py", ["none", 0, 0]), is_synthetic=True)
    load(files)
    warm = loader_of(script)
    disk = _disk_bytes_per_s(bench, files[:120])
    steps_s = []
    with tempfile.TemporaryDirectory() as place:
        for _ in range(bench.repeats):
            load(files)
            evict(_some_of(files, 1.0 - ratio))
            with throttled(folder, DISK_BYTES_PER_S):
                found = run_script(script, Path(place), devices=1, is_synthetic=False)
            steps_s.append(found.step_s)
    loader = replace(warm, cached_ratio=ratio, disk_bytes_per_s=disk, stored_bytes=FILE_BYTES)
    return {
        "predicted_s": predicted_s(loader, without_s, BATCH),
        "measured_s": median(steps_s),
        "runs_s": steps_s,
        "without_s": without_s,
        "loader": loader.to_dict(),
        "step_s": median(steps_s),
        "of_value": 0.05,
    }


def _disk_bytes_per_s(bench: Bench, files: Sequence[Path]) -> float:
    """What the throttled disk gives in the long run, by the probe's own measurement."""
    if ("disk",) not in bench.known:
        with throttled(files[0].parent, DISK_BYTES_PER_S):
            evict(files)
            # What the kernel lets through at once comes first.
            read_bytes_per_s(files[:20])
            bench.known["disk",] = read_bytes_per_s(files[20:])
    return bench.known["disk",]


def _some_of(files: Sequence[Path], ratio: float) -> list[Path]:
    """A share of the files, evenly spread over them."""
    return [
        path for number, path in enumerate(files) if int((number + 1) * ratio) > int(number * ratio)
    ]


# Exchanges of gradients

# (tensors, width): 40 MB in all in 10 to 200 tensors, then 10 equal tensors of 1 to 100 MB in all.
EQUAL_BYTES = ((10, 1000), (25, 632), (50, 447), (100, 316), (200, 224))
EQUAL_TENSORS = ((10, 158), (10, 354), (10, 707), (10, 1581))
STRATEGIES = {"bucketed": "ddp", "unbucketed": "ddp:unbucketed"}


def exchange(bench: Bench) -> Iterator[Case]:
    """The stall of each model: within 20 %."""
    for (tensors, width), how in product((*EQUAL_BYTES, *EQUAL_TENSORS), STRATEGIES):
        name = f"{tensors} x {4 * width * width / 1e6:.2f} MB, {how}"
        yield Case(name, partial(_exchange, bench, tensors, width, how))


def _exchange(bench: Bench, tensors: int, width: int, how: str) -> Record:
    predicted_s = _predicted_exchange_s(tensors, width, STRATEGIES[how])
    # Alone, a rank exchanges nothing.
    alone = bench.script("exchange.py", [tensors, width, "bucketed"], devices=2)
    alone_s = bench.step_s(alone, is_synthetic=True, devices=1)
    both = bench.script("exchange.py", [tensors, width, how], devices=2)
    both_s = bench.step_s(both, is_synthetic=True)
    return {
        "predicted_s": predicted_s,
        "measured_s": both_s - alone_s,
        "alone_s": alone_s,
        "step_s": both_s,
        "of_value": 0.20,
    }


def _predicted_exchange_s(tensors: int, width: int, strategy: str) -> float:
    model, batch = layers(tensors, width)
    graph = est.trace_model(model, batch, optimizer="sgd", name=f"{tensors} layers")
    request = EstimateRequest.of(graph, "1x2:local", strategy=strategy)
    found = predict_stalls(request).interconnect
    assert found is not None
    return found.stall_s


# The suite

PARTS: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "injected": injected,
    "loaders": loaders,
    "cached": cached,
    "exchange": exchange,
}


def run(options: Options) -> Iterator[Record]:
    """Every case of every part, within its bounds or not; then what parts show together.

    A quick run puts two costs into a script.
    """
    records = Records(options.work / "records.jsonl")
    os.environ["ESTIMATOR_HOME"] = str(options.work.resolve() / "home")
    local_machine(options.work.resolve() / "home" / "machines")
    sizes = {"steps": 10, "repeats": 1} if options.quick else {"steps": 30, "repeats": 3}
    bench = Bench(**sizes, folder=options.work.resolve())
    for part, cases_of in PARTS.items():
        chosen = [case for case in cases_of(bench) if options.takes(case.name)]
        if options.quick and not options.only:
            chosen = chosen[:2] if part == "injected" else []
        cases = [_measured(records, part, case) for case in chosen]
        yield from cases
        if cases:
            missed = sum(not case["met"] for case in cases)
            name = f"{part}: beyond their bounds, of {len(cases)}"
            yield {"id": name, "value": missed, "bound": 0}


def _measured(records: Records, part: str, case: Case) -> Record:
    if not records.of(part, case.name):
        found = {"of_step": 0.0, **case.measure()}
        off_s = abs(found["measured_s"] - found["predicted_s"])
        allowed = max(
            found["of_value"] * abs(found["predicted_s"]), found["of_step"] * found["step_s"]
        )
        about = {"kind": part, "key": case.name, "id": f"{part}: {case.name}", "method": part}
        records.add({**about, **found, "met": off_s <= allowed})
        say(f"{about['id']}: {milliseconds(off_s)} off, {milliseconds(allowed)} allowed")
    return records.of(part, case.name)[-1]
