"""Run the commands of README.md and of docs/, and compare what they print, numbers masked.

A block ```console holds commands after "$ " and what each prints; below a line <!-- lines=N -->
the first N lines of that. Commands run in one empty folder, in the order of their page. --write
puts what they print now into the pages.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A word after "console" would have the site show the block as text.
_BLOCK = re.compile(r"^(?:<!-- lines=(\d+) -->\n)?```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_COMMAND_S = 300.0


def main() -> int:
    """Check the pages given, by default all; how many blocks differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    differing = 0
    for page in asked.pages or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        found, blocks, wrong = rerun(text)
        if asked.write:
            page.write_text(found)
        elif wrong:
            differing += len(wrong)
            print("\n".join(wrong))
        if blocks:
            print(f"{page.name}: {blocks} blocks, {len(wrong)} differ")
    return 0 if asked.write else differing


def rerun(text: str) -> tuple[str, int, list[str]]:
    """The page with what its commands print now, how many blocks it has, and what differs."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:

        def block(match: re.Match[str]) -> str:
            lines, body = match[1], match[2]
            commands = [line for line in body.splitlines() if line.startswith("$ ")]
            printed = ""
            for command in commands:
                printed += f"{command}\n{first(run(command[2:], Path(folder)), lines)}"
            if masked(printed) != masked(body):
                pair = (masked(body).splitlines(), masked(printed).splitlines())
                wrong.append("\n".join(difflib.unified_diff(*pair, "page", "printed", lineterm="")))
            head = f"<!-- lines={lines} -->\n" if lines else ""
            return f"{head}```console\n{printed}```"

        found = _BLOCK.sub(block, text)
    return found, len(_BLOCK.findall(text)), wrong


def run(command: str, folder: Path) -> str:
    """What a command prints on stdout and stderr."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "ESTIMATOR_HOME": str(folder / "home"),
        "COLUMNS": "100",
    }
    words = command.replace("estimator ", f"{sys.executable} -m estimator.cli.main ", 1)
    ended = subprocess.run(
        words if command.startswith("estimator ") else command,
        shell=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_COMMAND_S,
        check=False,
    )
    return ended.stdout


def first(printed: str, lines: str | None) -> str:
    """The first lines of an output, without what stands at their ends."""
    kept = [line.rstrip() for line in printed.splitlines()]
    if lines is not None:
        kept = kept[: int(lines)]
    while kept and not kept[-1]:
        kept.pop()
    return "".join(f"{line}\n" for line in kept)


def masked(text: str) -> str:
    """A text whose numbers, spaces and bars may differ: other versions of torch count otherwise.

    >>> masked("step time  412 ms ± 6.0 %") == masked("step time   9 ms ± 10 %")
    True
    """
    text = re.sub(r"[█─]+", "", _NUMBER.sub("#", text))
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
