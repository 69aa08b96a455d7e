"""Read files of other tools, each recognised by its content."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from estimator.errors import ImportedFileError, StoreError, printable
from estimator.files import parse_json, read_file
from estimator.probe.imports import nccl_tests, nccl_topology, perftest, slurm, smi_topology
from estimator.probe.imports.findings import Imported, join
from estimator.probe.imports.nvbandwidth import read_nvbandwidth
from estimator.probe.imports.printed_lines import printed
from estimator.units import MIB

# The longest of these outputs are some hundred kilobytes.
_MOST_BYTES = 4 * MIB
# What names and numbers are found in a file that its tool never wrote so.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_KNOWN = (
    "nvbandwidth --json, nccl-tests (text or -J), perftest, NCCL_TOPO_DUMP_FILE, nvidia-smi topo "
    "-m, Slurm topology.conf or topology.yaml"
)


def read_imports(paths: Sequence[Path], *, machine: str) -> Imported:
    """What the files say together; `machine` is the type of a cluster's nodes.

    Raises StoreError for files that cannot be read, ImportedFileError, naming the file, for what
    is in them.
    """
    return join([_read(path, machine) for path in paths])


def _read(path: Path, machine: str) -> Imported:
    try:
        text = read_file(path, most_bytes=_MOST_BYTES).decode("utf-8", errors="replace")
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(path.stat().st_mtime))
    except OSError as error:
        raise StoreError(f"cannot read {path} ({error.strerror}); check its name") from None
    try:
        return recognise(text, at=at, machine=machine)
    except ImportedFileError as error:
        raise ImportedFileError(f"{path}: {error}") from None
    except _DAMAGE as error:
        # What a tool never writes: its numbers and lists where others belong.
        reason = printable(f"{type(error).__name__}: {error}")
        raise ImportedFileError(
            f"{path} is damaged ({reason}); let the tool write it again"
        ) from None


def recognise(text: str, *, at: str, machine: str = "local") -> Imported:
    """Read a text in any of the formats; `at` is when it was made. Raises ImportedFileError."""
    start = text.lstrip()[:1]
    if start == "{":
        return _read_json(text, at)
    if start == "<":
        return nccl_topology.read_nccl_topology(text)
    text = printed(text, (nccl_tests.BANNER, perftest.TITLE, smi_topology.HEADER))
    if nccl_tests.BANNER.search(text):
        return nccl_tests.read_nccl_tests(text, at=at)
    if perftest.TITLE.search(text):
        return perftest.read_perftest(text, at=at)
    if smi_topology.HEADER.search(text):
        return smi_topology.read_smi_topology(text)
    if slurm.CONF_LINE.search(text):
        return slurm.read_topology_conf(text, machine=machine)
    if slurm.YAML_LINE.search(text):
        return slurm.read_topology_yaml(text, machine=machine)
    raise ImportedFileError(f"the format is not known; known are {_KNOWN}")


def _read_json(text: str, at: str) -> Imported:
    try:
        report: Any = parse_json(text)
    except ValueError as error:
        raise ImportedFileError(
            f"the JSON is cut off or damaged ({error}); write it again"
        ) from None
    if isinstance(report, Mapping) and "nvbandwidth" in report:
        return read_nvbandwidth(report, at=at)
    if isinstance(report, Mapping) and "results" in report and "args" in report:
        return nccl_tests.read_nccl_tests_json(report, at=at)
    raise ImportedFileError(f"the format is not known; known are {_KNOWN}")
