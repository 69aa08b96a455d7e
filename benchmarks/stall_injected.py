"""Put known costs into a real script and see which stalls are reported of it."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from records import Record, say
from stall_bench import Bench, Case, loader_of, predicted_s, throttled
from stall_scripts.injected import BATCH, FILE_BYTES, GRADIENT_BYTES, write_files
from testbed.description import TestbedDescription
from testbed.network import INTERFACE, testbed, unavailable_reason

from estimator.probe.devices.storage import evict
from estimator.waits.measured import MeasuredStalls, StallName, measure_stalls
from estimator.waits.runs import Script, run

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


def _found(found: MeasuredStalls, stall: StallName, expected_s: float, **more: float) -> Record:
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
        return _found(found, "prep", 0.0, of_step=HIDDEN_RATIO)
    # Making a batch takes a little without the cost as well.
    plain = bench.script("injected.py", ["none", 0, 0])
    plain_s = bench.step_s(plain, is_synthetic=False) - bench.step_s(plain, is_synthetic=True)
    return _found(found, "prep", BATCH * seconds, plain_s=plain_s)


def _wire(bench: Bench, seconds: float) -> Record:
    found = measure_stalls(
        bench.script("injected.py", ["wire", seconds, 0], devices=2), repeats=bench.repeats
    )
    plain = bench.script("injected.py", ["none", 0, 0], devices=2)
    alone_s = bench.step_s(plain, is_synthetic=True, devices=1)
    plain_s = bench.step_s(plain, is_synthetic=True) - alone_s
    return _found(found, "interconnect", seconds * GRADIENT_BYTES / 1e6, plain_s=plain_s)


def _fetch(bench: Bench) -> Record:
    with _reading(bench, devices=1) as (script, _):
        found = measure_stalls(script, repeats=bench.repeats)
    disk_s = BATCH * FILE_BYTES / DISK_BYTES_PER_S
    return _found(found, "fetch", max(disk_s - found.runs["T3"].step_s, 0.0))


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
    return _found(found, "network", wire_s - found.stalls["interconnect"].stall_s)


def _sum(bench: Bench) -> Record:
    """One device's step and all stalls of two, against further runs with everything in them."""
    again_s = []
    with _reading(bench, devices=2) as (script, files), tempfile.TemporaryDirectory() as folder:
        found = measure_stalls(script, repeats=bench.repeats)
        for _ in range(bench.repeats):
            evict(files)
            full = run(script, Path(folder), devices=2, is_synthetic=False)
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
        "of_step": 0.0,
    }


def workers(bench: Bench) -> Iterator[Case]:
    """The fewest workers that hide all of a sleep that workers can hide: right within one."""
    for needed in (1, 2, 4, 8, 16):
        yield Case(f"sleep of {needed - 0.4:g} steps a batch", partial(_workers, bench, needed))


def _workers(bench: Bench, needed: int) -> Record:
    """Seconds stand for numbers of workers."""
    without_s = bench.step_s(bench.script("injected.py", ["none", 0, 0]), is_synthetic=True)
    sleep_s = (needed - 0.4) * without_s / BATCH
    # Measured with no files to read, from the folder that has none.
    alone = bench.script("injected.py", ["sleep", sleep_s, 0, bench.folder / "none"])
    loader = loader_of(alone)

    def measured_s(count: int) -> float:
        script = bench.script("injected.py", ["sleep", sleep_s, count])
        # The queue is full at first: with more steps than it holds.
        longer = replace(script, steps=bench.steps + 2 * count, warmup=5 + 2 * count)
        return bench.step_s(longer, is_synthetic=False)

    def expected_s(count: int) -> float:
        return predicted_s(loader.with_workers(count), without_s, BATCH)

    return {
        "predicted_s": float(_fewest(expected_s, range(1, 2 * needed + 3))),
        "measured_s": float(_fewest(measured_s, range(max(needed - 2, 1), needed + 3))),
        "step_s": 1.0,
        "without_s": without_s,
        "loader": loader.to_dict(),
        "of_value": 0.0,
        "of_step": 1.0,
    }


def _fewest(step_s: Callable[[int], float], tried: range) -> int:
    """The fewest workers whose step is hardly longer than that of the most."""
    least_s = step_s(tried[-1])
    return next(count for count in tried if step_s(count) <= (1 + HIDDEN_RATIO) * least_s)
