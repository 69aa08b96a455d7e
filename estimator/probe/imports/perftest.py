"""Read what perftest prints: ib_write_bw, ib_read_bw, ib_send_bw and their latency twins.

``MB/sec`` in its tables is 2²⁰ bytes per second, ``Gb/sec`` 10⁹ bits (linux-rdma/perftest#257).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from estimator.errors import ImportedFileError
from estimator.machines.profile import Link, LinkKind
from estimator.probe.imports.findings import Imported, imported

FORMAT = "perftest"
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
            bandwidth_bytes_per_s=max(rate for _, rate in found),
            provenance=imported(at, samples=len(found), note=FORMAT),
        )
        for kind, found in rates.items()
    ]
    return Imported(formats=(FORMAT,), network=tuple(network), latencies_s=latencies)


def _kind(part: str) -> LinkKind:
    found = _LINK_TYPE.search(part)
    if found is None or found[1] not in _KINDS:
        raise ImportedFileError(
            "the perftest output does not say its link type (IB or Ethernet); give the whole output"
        )
    return _KINDS[found[1]]


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
            try:
                rows.append((float(cells[0]), float(cells[index])))
            except (IndexError, ValueError):
                raise ImportedFileError(
                    f"the perftest output is cut off at '{line.strip()}'; give the whole output"
                ) from None
    good = [(size, value) for size, value in rows if value > 0]
    if not good:
        raise ImportedFileError(
            f"the perftest output has no row with a positive '{column}'; give the whole output"
        )
    return good
