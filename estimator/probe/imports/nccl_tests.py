"""Read what nccl-tests measured: its table, or the JSON that ``-J FILE`` writes.

Sizes are bytes of the whole buffer, times µs (NVIDIA/nccl-tests, doc/PERFORMANCE.md, src/util.cu).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from estimator.errors import ImportedFileError, printable, quoted
from estimator.machines.profile import CollectiveCost, CollectiveName
from estimator.probe.imports.findings import Imported, imported
from estimator.probe.line_fit import fit_line

FORMAT = "nccl-tests"
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
        op = _op_of_run(text[before[number] : start] + run, run, len(ranks))
        costs.append(_cost(op, ranks, _printed_points(run), at))
        names |= {rank.device: rank.name for rank in ranks}
    return Imported(formats=(FORMAT,), collectives=tuple(costs), device_names=names)


def read_nccl_tests_json(report: Mapping[str, Any], *, at: str) -> Imported:
    """Collectives from the report of one run; raises ImportedFileError."""
    try:
        program = PurePath(report["args"][0]).name
        config = report["config"]
        ranks = _reported_ranks(config)
        points = [_reported_point(result) for result in report["results"]]
        finished = "out_of_bounds" in report
        wrong = finished and int(report["out_of_bounds"]["count"]) > 0
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ImportedFileError(
            f"the JSON of nccl-tests lacks or garbles {printable(str(error))}; run the "
            f"test with -J again"
        ) from None
    _check_complete(finished, wrong)
    found = _PROGRAM.search(program)
    op = _known_op(found[1] if found else program)
    started = str(report.get("start_time", at))
    cost = _cost(op, ranks, [point for point in points if point[0] > 0], started)
    names = {rank.device: rank.name for rank in ranks}
    return Imported(formats=(FORMAT,), collectives=(cost,), device_names=names)


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
    if header is None:
        raise _cut_off()
    _check_complete(footer is not None, int(footer[1]) if footer is not None else 0)
    names = header[0].lstrip("# ").split()
    if "time" not in names:
        raise ImportedFileError(
            "the nccl-tests output has CPU times (-C 1), not durations; run it without -C"
        )
    out_of_place = names.index("time")
    points = []
    checked = [place for place, name in enumerate(names) if name == "#wrong"]
    for cells in _rows(run[header.end() :], len(names)):
        wrong = [cells[place] for place in checked if cells[place] not in ("0", "N/A")]
        if wrong:
            raise _wrong(f"{wrong[0]} of {cells[0]} bytes")
        try:
            point = float(cells[0]), float(cells[out_of_place]) * 1e-6
        except ValueError:
            raise ImportedFileError(
                f"the nccl-tests output is garbled at '{' '.join(cells)}'; give the whole output"
            ) from None
        # Sizes too small to divide among the ranks are printed as 0 bytes.
        if point[0] > 0:
            points.append(point)
    return points


def _rows(body: str, columns: int) -> Iterator[list[str]]:
    for line in body.splitlines():
        cells = line.split()
        if len(cells) < 3 or not (cells[0].isdigit() and cells[1].isdigit()):
            continue
        if len(cells) < columns:
            raise ImportedFileError(
                f"the nccl-tests output is cut off at '{line.strip()}'; give the whole output"
            )
        yield cells


def _reported_point(result: Mapping[str, Any]) -> tuple[float, float]:
    timed = result["out_of_place"] or result["in_place"]
    if timed.get("nwrong"):
        raise _wrong(f"{quoted(timed['nwrong'])} of {quoted(result['size'])} bytes")
    return float(result["size"]), float(timed["time"]) * 1e-6


def _check_complete(finished: bool, wrong: int) -> None:
    if not finished:
        raise _cut_off()
    if wrong:
        raise _wrong(f"{wrong} values out of bounds")


def _wrong(how_many: str) -> ImportedFileError:
    return ImportedFileError(
        f"the nccl-tests found wrong results ({how_many}); mend the machine and run them again"
    )


def _cut_off() -> ImportedFileError:
    return ImportedFileError(
        "the nccl-tests output is cut off before 'Out of bounds values'; give the whole output"
    )


def _op_of_run(text: str, run: str, ranks: int) -> CollectiveName:
    """By the program's name, else by what the table shows: the operation and busbw / algbw."""
    program = _PROGRAM.search(text)
    if program:
        return _known_op(program[1])
    header = _HEADER.search(run)
    names = header[0].lstrip("# ").split() if header else []
    if ranks > 2 and {"redop", "algbw", "busbw"} <= set(names) and header is not None:
        # The largest size has the most digits; factors are those of doc/PERFORMANCE.md.
        for cells in reversed(list(_rows(run[header.end() :], len(names)))):
            factor = float(cells[names.index("busbw")]) / float(cells[names.index("algbw")])
            if cells[names.index("redop")] == "sum":
                return "all_reduce" if factor > 1 else "reduce_scatter"
            break
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
        provenance=imported(at, samples=len(good), relative_error=error, note=FORMAT),
    )
