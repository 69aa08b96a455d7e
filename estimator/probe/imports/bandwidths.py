"""Read what nccl-tests, nvbandwidth and perftest measured: collectives, copies, messages.

nccl-tests: sizes are bytes of the whole buffer, times µs (NVIDIA/nccl-tests, doc/PERFORMANCE.md,
src/util.cu).

nvbandwidth: rates are in GB/s = 10⁹ bytes per second, latencies in ns (NVIDIA/nvbandwidth,
README).

perftest: ``MB/sec`` in its tables is 2²⁰ bytes per second, ``Gb/sec`` 10⁹ bits (linux-
rdma/perftest#257).
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from estimator.errors import ImportedFileError, quoted
from estimator.machines.profile import CollectiveCost, CollectiveName, Link, LinkKind
from estimator.probe.imports.findings import Imported, imported
from estimator.probe.links.copies import fit_line

NCCL_TESTS = "nccl-tests"
BANNER = re.compile(r"^#\s*nThread\s", re.M)
_MOST_RANKS = 1 << 20
_RANK = re.compile(
    r"^#\s+Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+\d+ on\s+(\S+) device\s+(\d+) "
    r"\[[^\]]*\] (.+)$",
    re.M,
)
_HEADER = re.compile(r"^#\s+size\s+count\s+type\s.*$", re.M)
_FOOTER = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)", re.M)
_PROGRAM = re.compile(r"\b([a-z_]+)_perf\b")
_OPS: dict[str, CollectiveName] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
}


@dataclass(frozen=True, slots=True)
class _Rank:
    host: str
    device: int
    name: str


def read_nccl_tests(text: str, *, at: str) -> Imported:
    """Collectives from the printed tables of one or more runs; raises ImportedFileError."""
    starts = [match.start() for match in BANNER.finditer(text)]
    before = [0, *(_end_of_run(text, start) for start in starts)]
    costs, names = [], dict[int, str]()
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(text)
        run = text[start:end]
        ranks = _printed_ranks(run)
        op = _op_of_run(text[before[number] : start] + run)
        costs.append(_cost(op, ranks, _printed_points(run), at))
        names |= {rank.device: rank.name for rank in ranks}
    return Imported(formats=(NCCL_TESTS,), collectives=tuple(costs), device_names=names)


def read_nccl_tests_json(report: Mapping[str, Any], *, at: str) -> Imported:
    """Collectives from the report of one run; raises ImportedFileError."""
    program, ranks = PurePath(report["args"][0]).name, _reported_ranks(report["config"])
    points = [_reported_point(result) for result in report["results"]]
    is_finished = "out_of_bounds" in report
    _check_complete(is_finished, int(report["out_of_bounds"]["count"]) if is_finished else 0)
    match = _PROGRAM.search(program)
    op = _known_op(match[1] if match else program)
    started = str(report.get("start_time", at))
    cost = _cost(op, ranks, [point for point in points if point[0] > 0], started)
    names = {rank.device: rank.name for rank in ranks}
    return Imported(formats=(NCCL_TESTS,), collectives=(cost,), device_names=names)


def _end_of_run(text: str, start: int) -> int:
    footer = _FOOTER.search(text, start)
    return footer.end() if footer else start


def _printed_ranks(run: str) -> list[_Rank]:
    lines = list(_RANK.finditer(run))
    if len({line[2] for line in lines}) > 1:
        raise ImportedFileError(
            "the nccl-tests ran several groups at once; import a run of one group"
        )
    if not lines or {int(line[1]) for line in lines} != set(range(len(lines))):
        raise ImportedFileError(
            "the nccl-tests output does not list every rank ('# Rank 0 ...'); give the whole output"
        )
    ordered = sorted(lines, key=lambda line: int(line[1]))
    return [_Rank(line[3], int(line[4]), line[5].strip()) for line in ordered]


def _reported_ranks(config: Mapping[str, Any]) -> list[_Rank]:
    # The writer lists the first device of each process only (parseRankInfo in src/util.cu).
    per_process = int(config["nthreads"]) * int(config["ngpus"])
    devices = config["devices"]
    # Counted before they are listed.
    if not 1 <= per_process <= _MOST_RANKS or len(devices) * per_process > _MOST_RANKS:
        raise ValueError(f"the number of ranks, {quoted(per_process)} a process")
    return [
        _Rank(str(entry["hostname"]), int(entry["device"]) + number, str(entry["device_info"]))
        for entry in devices
        for number in range(per_process)
    ]


def _printed_points(run: str) -> list[tuple[float, float]]:
    footer, header = _FOOTER.search(run), _HEADER.search(run)
    _check_complete(bool(footer and header), int(footer[1]) if footer else 0)
    names, body = (header[0].lstrip("# ").split(), run[header.end() :]) if header else ([], "")
    if "time" not in names:
        raise ImportedFileError(
            "the nccl-tests output has CPU times (-C 1), not durations; run it without -C"
        )
    out_of_place = names.index("time")
    points = []
    checked = [place for place, name in enumerate(names) if name == "#wrong"]
    for cells in _table_rows(body):
        wrong = [cells[place] for place in checked if cells[place] not in ("0", "N/A")]
        if wrong:
            raise _wrong(f"{wrong[0]} of {cells[0]} bytes")
        point = float(cells[0]), float(cells[out_of_place]) * 1e-6
        # Sizes too small to divide among the ranks are printed as 0 bytes.
        if point[0] > 0:
            points.append(point)
    return points


def _table_rows(body: str) -> Iterator[list[str]]:
    for line in body.splitlines():
        cells = line.split()
        if len(cells) > 2 and cells[0].isdigit() and cells[1].isdigit():
            yield cells


def _reported_point(result: Mapping[str, Any]) -> tuple[float, float]:
    timed = result["out_of_place"] or result["in_place"]
    if timed.get("nwrong"):
        raise _wrong(f"{quoted(timed['nwrong'])} of {quoted(result['size'])} bytes")
    return float(result["size"]), float(timed["time"]) * 1e-6


def _check_complete(finished: bool, wrong: int) -> None:
    if not finished:
        raise ImportedFileError(
            "the nccl-tests output is cut off before 'Out of bounds values'; give the whole output"
        )
    if wrong:
        raise _wrong(f"{wrong} values out of bounds")


def _wrong(how_many: str) -> ImportedFileError:
    return ImportedFileError(
        f"the nccl-tests found wrong results ({how_many}); mend the machine and run them again"
    )


def _op_of_run(text: str) -> CollectiveName:
    program = _PROGRAM.search(text)
    if program:
        return _known_op(program[1])
    raise ImportedFileError(
        "the nccl-tests output does not say which collective it timed; keep the command line, such "
        "as all_reduce_perf, in the file"
    )


def _known_op(program: str) -> CollectiveName:
    if program not in _OPS:
        raise ImportedFileError(
            f"'{program}' of nccl-tests is no collective of a profile; import one of "
            f"{', '.join(_OPS)}"
        )
    return _OPS[program]


def _cost(
    op: CollectiveName, ranks: Sequence[_Rank], points: Sequence[tuple[float, float]], at: str
) -> CollectiveCost:
    good = [(size, seconds) for size, seconds in points if seconds > 0]
    if not good or len(ranks) < 2:
        raise ImportedFileError(
            f"the nccl-tests output has {len(good)} timed sizes over {len(ranks)} ranks; run it "
            "with -g 2 or more, or under mpirun"
        )
    if len({size for size, _ in good}) > 1:
        line = fit_line([size for size, _ in good], [seconds for _, seconds in good])
        latency_s, rate, error = line.latency_s, line.bandwidth_bytes_per_s, line.relative_error
    else:
        latency_s, rate, error = 0.0, good[0][0] / good[0][1], None
    per_host = Counter(rank.host for rank in ranks)
    return CollectiveCost(
        op=op,
        backend="nccl",
        group_size=len(ranks),
        nodes=len(per_host),
        hosts=tuple(rank.host for rank in ranks) if len(per_host) > 1 else (),
        points=tuple(sorted(good)),
        latency_s=latency_s,
        bandwidth_bytes_per_s=rate,
        provenance=imported(at, samples=len(good), relative_error=error, note=NCCL_TESTS),
    )


NVBANDWIDTH = "nvbandwidth"
# Test cases by link: whether every device copies at once. Host memory is pinned in all of them.
# The copy engine moves what a training step copies, so its figures stand before the kernels'.
_HOST_COPIES: tuple[tuple[str, LinkKind, bool], ...] = (
    ("host_to_device_memcpy", "h2d", False),
    ("device_to_host_memcpy", "d2h", False),
    ("host_to_all_memcpy", "h2d", True),
    ("all_to_host_memcpy", "d2h", True),
)
_DEVICE_COPIES = ("device_to_device_memcpy_write", "device_to_device_memcpy_read")
_DEVICE = re.compile(r"(\d+): (.+?) \([0-9A-Fa-fPCI:.]+\)(?:: \((.*)\))?")


def read_nvbandwidth(report: Mapping[str, Any], *, at: str) -> Imported:
    """Links of a machine from the parsed report; raises ImportedFileError."""
    body = report.get("nvbandwidth")
    if not isinstance(body, Mapping) or not isinstance(body.get("testcases"), list):
        raise ImportedFileError("the nvbandwidth report has no testcases; run nvbandwidth again")
    if "error" in body:
        raise ImportedFileError(f"nvbandwidth reports an error ({body['error']}); run it again")
    names = _device_names(body)
    cases = {
        case["name"]: case
        for case in body["testcases"]
        if isinstance(case, Mapping) and case.get("status") == "Passed" and "name" in case
    }
    links = (*_host_links(cases, at), *_device_links(cases, at))
    if not links:
        raise ImportedFileError(
            "no copy between host and device passed in the nvbandwidth report; run nvbandwidth -t "
            "host_to_device_memcpy_ce --json"
        )
    return Imported(formats=(NVBANDWIDTH,), device_names=names, links=links)


def _device_names(body: Mapping[str, Any]) -> dict[int, str]:
    listed = body.get("GPU Device list", body.get("GPU Device List", []))
    matches = [_DEVICE.fullmatch(str(entry)) for entry in listed]
    names = {int(match[1]): match[2] for match in matches if match}
    if len({match[3] for match in matches if match}) > 1 or len(names) < len(matches):
        raise ImportedFileError(
            "the nvbandwidth report lists devices of several hosts; run it on one node"
        )
    return names


def _host_links(cases: Mapping[str, Mapping[str, Any]], at: str) -> list[Link]:
    links, latency_s = [], _latency_s(cases, "host_device_latency_sm")
    for test, kind, at_once in _HOST_COPIES:
        case = cases.get(f"{test}_ce", cases.get(f"{test}_sm"))
        if case is None:
            continue
        rates = _cells(case)
        links.append(
            _link(kind, rates, latency_s, at, pinned=True, flows=len(rates) if at_once else 1)
        )
    return links


def _device_links(cases: Mapping[str, Mapping[str, Any]], at: str) -> list[Link]:
    latency_s = _latency_s(cases, "device_to_device_latency_sm")
    for test in (f"{name}_{engine}" for engine in ("ce", "sm") for name in _DEVICE_COPIES):
        if test in cases:
            return [_link("d2d", _cells(cases[test]), latency_s, at)]
    return []


def _latency_s(cases: Mapping[str, Mapping[str, Any]], test: str) -> float:
    return 1e-9 * statistics.median(_cells(cases[test])) if test in cases else 0.0


def _link(
    kind: LinkKind,
    rates: Sequence[float],
    latency_s: float,
    at: str,
    *,
    pinned: bool = False,
    flows: int = 1,
) -> Link:
    middle = statistics.median(rates)
    spread = statistics.median(abs(rate / middle - 1) for rate in rates)
    return Link(
        kind=kind,
        latency_s=latency_s,
        bandwidth_bytes_per_s=middle * 1e9,
        pinned=pinned,
        flows=flows,
        provenance=imported(
            at,
            samples=len(rates),
            relative_error=spread,
            note=f"{NVBANDWIDTH}: {min(rates):.4g} to {max(rates):.4g} GB/s; "
            "latency is a memory read's",
        ),
    )


def _cells(case: Mapping[str, Any]) -> list[float]:
    """The measured cells of a matrix: not N/A, not the zeros of a device with itself."""
    rows = case.get("bandwidth_matrix") or ()
    cells = [float(cell) for row in rows for cell in row if cell != "N/A"]
    cells = [cell for cell in cells if cell > 0]
    if not cells:
        raise ImportedFileError(
            f"the nvbandwidth test '{case['name']}' has no numbers; run nvbandwidth again"
        )
    return cells


PERFTEST = "perftest"
TITLE = re.compile(
    r"^[^\S\n]*(RDMA_Write|RDMA_Read|Send)\s+(Post List )?(Bidirectional )?(BW|Latency) Test"
    r"[^\S\n]*$",
    re.M,
)
_LINK_TYPE = re.compile(r"Link type\s*:\s*(\w+)")
_KINDS: dict[str, LinkKind] = {"IB": "infiniband", "Ethernet": "roce"}
_COLUMN = re.compile(r"#\w+|[\w.%]+(?: \w+)?\[[^\]]+\]")
_UNITS = {"MB/sec": float(1 << 20), "MiB/sec": float(1 << 20), "Gb/sec": 1e9 / 8}


def read_perftest(text: str, *, at: str) -> Imported:
    """Network links from the output of one or more tests; raises ImportedFileError.

    The rate is the best average over the message sizes. A write or send latency is one way; a read
    waits for its answer, so half of it is.
    """
    titles = list(TITLE.finditer(text))
    rates: dict[LinkKind, list[tuple[float, float]]] = {}
    latencies: dict[LinkKind, float] = {}
    for title, following in zip(titles, [*titles[1:], None], strict=True):
        part = text[title.end() : following.start() if following else None]
        kind = _kind(part)
        if title[4] == "BW":
            ways = 2 if title[3] else 1
            rates.setdefault(kind, []).extend((size, r / ways) for size, r in _bandwidths(part))
        else:
            ways = 2 if title[1] == "RDMA_Read" else 1
            smallest_s = min(_rows(part, "t_typical[usec]"))[1] * 1e-6 / ways
            latencies[kind] = min(smallest_s, latencies.get(kind, smallest_s))
    network = [
        Link(
            kind=kind,
            locality="rack",
            latency_s=0.0,
            bandwidth_bytes_per_s=max(rate for _, rate in rates_of_kind),
            provenance=imported(at, samples=len(rates_of_kind), note=PERFTEST),
        )
        for kind, rates_of_kind in rates.items()
    ]
    return Imported(formats=(PERFTEST,), network=tuple(network), latencies_s=latencies)


def _kind(part: str) -> LinkKind:
    match = _LINK_TYPE.search(part)
    if match is None or match[1] not in _KINDS:
        raise ImportedFileError(
            "the perftest output does not say its link type (IB or Ethernet); give the whole output"
        )
    return _KINDS[match[1]]


def _bandwidths(part: str) -> Iterator[tuple[float, float]]:
    for unit, factor in _UNITS.items():
        column = f"BW average[{unit}]"
        if column in part:
            for size, rate in _rows(part, column):
                yield size, rate * factor
            return
    raise ImportedFileError(
        "the perftest output has no 'BW average' column; give the output of the client's side"
    )


def _rows(part: str, column: str) -> list[tuple[float, float]]:
    """(bytes, value of the column) of every row below the header."""
    lines = part.splitlines()
    header = next((number for number, line in enumerate(lines) if "#bytes" in line), None)
    rows: list[tuple[float, float]] = []
    if header is not None:
        names = [name.strip() for name in _COLUMN.findall(lines[header])]
        index = names.index(column) if column in names else None
        for line in lines[header + 1 :]:
            cells = line.split()
            if index is None or not cells or not cells[0].isdigit():
                continue
            rows.append((float(cells[0]), float(cells[index])))
    good = [(size, value) for size, value in rows if value > 0]
    if not good:
        raise ImportedFileError(
            f"the perftest output has no row with a positive '{column}'; give the whole output"
        )
    return good
