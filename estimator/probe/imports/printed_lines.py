"""Take from a terminal's or launcher's output what one tool printed on one host."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
