"""Write down what this tree's package answers, or say how its answers differ from a record's.

``--write FILE`` asks every question of `recorded.questions` and `recorded.library`; ``--check
FILE`` asks them again and ends with 1 if an answer is another one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from recorded.answers import recorded
from recorded.comparison import differences, report
from records import say


def write_record(path: Path, answers: dict[str, Any]) -> None:
    """A line a question, sorted; without a time stamp, so that equal answers are equal files."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as stream:
        for name in sorted(answers):
            line = json.dumps([name, answers[name]], sort_keys=True, separators=(",", ":"))
            stream.write(line.encode() + b"\n")


def read_record(path: Path) -> dict[str, Any]:
    """The answers of a file by their questions."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return dict(map(json.loads, stream))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE")
    what.add_argument("--check", type=Path, metavar="FILE")
    parser.add_argument("--tolerance", type=float, default=1e-9, help="relative; default 1e-9")
    parser.add_argument("--only", metavar="GLOB", default="*", help="questions by their text")
    options = parser.parse_args(words)
    begun_s = time.monotonic()
    answers = recorded(lambda name: fnmatchcase(name, options.only))
    say(f"{len(answers)} answers in {time.monotonic() - begun_s:.0f} s")
    if options.write:
        write_record(options.write, answers)
        say(f"{options.write}: {options.write.stat().st_size / 1e6:.2f} MB")
        return 0
    kept = {
        name: answer
        for name, answer in read_record(options.check).items()
        if fnmatchcase(name, options.only)
    }
    found = [*differences(kept, answers, tolerance=options.tolerance)]
    print(report(found))
    return int(not kept or any(not each.is_wording for each in found))


if __name__ == "__main__":
    sys.exit(main())
