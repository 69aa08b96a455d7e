"""Take from a terminal's or launcher's output what one tool printed on one host."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Colours and underlines (ECMA-48, control sequences): nvidia-smi underlines its header.
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# What `srun -l` and `mpirun --tag-output` put before each line: "0: ", "[1,0]<stdout>:".
_LABEL = re.compile(r"^\s*(\d+: ?|\[[^\]\n]+\]<std(?:out|err)>: ?)", re.M)


def printed(text: str, formats: Sequence[re.Pattern[str]]) -> str:
    """The text without escape sequences and labels of tasks.

    Of labelled lines those of the first task remain in whose output one of `formats` is found;
    lines without a label, as the launcher's own, remain in their place.
    """
    text = _ESCAPE.sub("", text)
    labels = dict.fromkeys(match[1] for match in _LABEL.finditer(text))
    for label in labels:
        lines = [_line(line, label) for line in text.splitlines()]
        own = "\n".join(line for line in lines if line is not None)
        if any(known.search(own) for known in formats):
            return own
    return text


def _line(line: str, label: str) -> str | None:
    """A line of the task, or of none; None for that of another task."""
    match = _LABEL.match(line)
    if match is None:
        return line
    # The label's last space may be the first of what was printed, or missing before an empty line.
    return line[match.end() :] if match[1].rstrip() == label.rstrip() else None
