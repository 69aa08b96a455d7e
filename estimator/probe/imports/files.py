"""Read files of other tools, each recognised by its content."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from estimator.errors import ImportedFileError, StoreError, cause
from estimator.files import parse_json, read_file
from estimator.probe.imports import bandwidths, topologies
from estimator.probe.imports.bandwidths import read_nvbandwidth
from estimator.probe.imports.findings import Imported, join
from estimator.units import MIB

# Colours and underlines (ECMA-48, control sequences): nvidia-smi underlines its header.
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# What `srun -l` and `mpirun --tag-output` put before each line: "0: ", "[1,0]<stdout>:".
_LABEL = re.compile(r"^[^\S\n]*(\d+: ?|\[[^\]\n]+\]<std(?:out|err)>: ?)", re.M)


def printed(text: str, formats: Sequence[re.Pattern[str]]) -> str:
    """The text without escape sequences and labels of tasks.

    Of labelled lines those of the first task remain in whose output one of `formats` is found;
    lines without a label, as the launcher's own, remain in their place.
    """
    text = _ESCAPE.sub("", text)
    lines = [(_LABEL.match(line), line) for line in text.splitlines()]
    of_task: dict[str, list[str]] = {}
    for label, line in lines:
        if label is not None:
            # Its last space may be the first of what was printed, or missing before an empty line.
            of_task.setdefault(label[1].rstrip(), []).append(line[label.end() :])
    for task, printed_by_task in of_task.items():
        own = "\n".join(printed_by_task)
        if any(known.search(own) for known in formats):
            return "\n".join(
                line if label is None else line[label.end() :]
                for label, line in lines
                if label is None or label[1].rstrip() == task
            )
    return text


# The longest of these outputs are some hundred kilobytes.
_MOST_BYTES = 4 * MIB
# What readers raise where names, numbers and lists are not where the tool writes them; of XML too.
_DAMAGE = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError),
    *(TypeError, ValueError),
)
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


def recognise(text: str, *, at: str, machine: str = "local") -> Imported:
    """Read a text in any of the formats; `at` is when it was made. Raises ImportedFileError."""
    try:
        return _recognised(text, at, machine)
    except ImportedFileError:
        raise
    except _DAMAGE as error:
        raise ImportedFileError(
            f"the content is cut off or damaged ({cause(error)}); let the tool write it again"
        ) from None


def _recognised(text: str, at: str, machine: str) -> Imported:
    start = text.lstrip()[:1]
    if start == "{":
        return _read_json(text, at)
    if start == "<":
        return topologies.read_nccl_topology(text)
    text = printed(text, (bandwidths.BANNER, bandwidths.TITLE, topologies.HEADER))
    if bandwidths.BANNER.search(text):
        return bandwidths.read_nccl_tests(text, at=at)
    if bandwidths.TITLE.search(text):
        return bandwidths.read_perftest(text, at=at)
    if topologies.HEADER.search(text):
        return topologies.read_smi_topology(text)
    if topologies.CONF_LINE.search(text):
        return topologies.read_topology_conf(text, machine=machine)
    if topologies.YAML_LINE.search(text):
        return topologies.read_topology_yaml(text, machine=machine)
    raise ImportedFileError(f"the format is not known; known are {_KNOWN}")


def _read_json(text: str, at: str) -> Imported:
    report: Any = parse_json(text)
    if isinstance(report, Mapping) and "nvbandwidth" in report:
        return read_nvbandwidth(report, at=at)
    if isinstance(report, Mapping) and "results" in report and "args" in report:
        return bandwidths.read_nccl_tests_json(report, at=at)
    raise ImportedFileError(f"the format is not known; known are {_KNOWN}")
