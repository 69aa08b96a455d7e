"""Write down what any commit estimates, and say which estimates differ between two such records.

``write FILE --worktree PATH`` asks the `estimator` of another worktree; what is asked is this
tree's. ``compare A B`` ends with 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

from recorded.comparison import compare, report
from recorded.files import read_record, write_record
from records import say

HERE = Path(__file__).resolve()


def write(options: argparse.Namespace) -> int:
    """Run this command again with the worktree's package first on the path."""
    worktree = options.worktree.resolve()
    if not (worktree / "estimator" / "__init__.py").is_file():
        say(f"{worktree} has no estimator/__init__.py; give the root of a worktree")
        return 2
    command = [sys.executable, str(HERE), "ask", str(options.file.resolve()), str(worktree)]
    for pattern in options.only:
        command += ["--only", pattern]
    for pattern in options.excluded:
        command += ["--except", pattern]
    environment = os.environ | {
        "PYTHONPATH": str(worktree),
        "PYTHONHASHSEED": "0",
        # What transformers says of tiny models.
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }
    return subprocess.run(command, env=environment, cwd=worktree, check=False).returncode


def ask(options: argparse.Namespace) -> int:
    """Write the record of the package that is first on the path."""
    from recorded.answers import recorded

    import estimator

    found = Path(estimator.__file__).resolve().parent.parent
    if found != options.worktree:
        say(f"the package of {found} was imported, not that of {options.worktree}; run 'write'")
        return 2
    begun_s = time.monotonic()
    rows = dict(recorded(_wanted(options)))
    about = {
        "commit": _git(options.worktree, "describe", "--always", "--dirty"),
        "python": sys.version.split()[0],
        "seconds": round(time.monotonic() - begun_s, 1),
    }
    write_record(options.file, about, rows)
    size = options.file.stat().st_size / 1e6
    say(f"{options.file}: {len(rows)} estimates, {size:.1f} MB, {about['seconds']:.0f} s")
    return 0


def _git(folder: Path, *words: str) -> str:
    try:
        found = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def _wanted(options: argparse.Namespace) -> Callable[[str], bool]:
    return lambda text: _matches(text, options.only, options.excluded)


def _matches(text: str, only: list[str], excluded: list[str]) -> bool:
    """Whether a text matches one of `only` (if there are any) and none of `excluded`."""
    return (not only or any(fnmatchcase(text, each) for each in only)) and not any(
        fnmatchcase(text, each) for each in excluded
    )


def compare_files(options: argparse.Namespace) -> int:
    """Print how two records differ; 1 if an answer does."""
    one, two = (read_record(path) for path in (options.one, options.two))
    found = compare(
        one.rows,
        two.rows,
        rel=options.rel,
        is_wanted=_wanted(options),
        is_wanted_column=lambda name: _matches(name, options.columns, options.excluded_columns),
    )
    for side, record, path in (("A", one, options.one), ("B", two, options.two)):
        print(f"{side}: {path}, commit {record.about['commit']}, {len(record.rows)} estimates")
    print(report(found))
    return 0 if found.is_equal else 1


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    writing = commands.add_parser("write", help="write down what a worktree estimates")
    writing.add_argument("file", type=Path)
    writing.add_argument("--worktree", type=Path, default=HERE.parent.parent)
    writing.set_defaults(run=write)
    asking = commands.add_parser("ask", help="as 'write', of the package first on the path")
    asking.add_argument("file", type=Path)
    asking.add_argument("worktree", type=Path)
    asking.set_defaults(run=ask)
    comparing = commands.add_parser("compare", help="say which estimates of two records differ")
    comparing.add_argument("one", type=Path, metavar="A")
    comparing.add_argument("two", type=Path, metavar="B")
    comparing.add_argument("--rel", type=float, default=1e-9, help="relative difference allowed")
    comparing.add_argument("--columns", action="append", default=[], metavar="GLOB")
    comparing.add_argument(
        "--except-columns", action="append", default=[], metavar="GLOB", dest="excluded_columns"
    )
    comparing.set_defaults(run=compare_files)
    for each in (writing, asking, comparing):
        each.add_argument(
            "--only",
            action="append",
            default=[],
            metavar="GLOB",
            help="cases by name: graph|allocation|strategy|accumulation|batch|cluster|calibration|"
            "form",
        )
        each.add_argument("--except", action="append", default=[], metavar="GLOB", dest="excluded")
    options = parser.parse_args(words)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
