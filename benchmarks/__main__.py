"""Run the benchmarks: ``python -m benchmarks list``, ``run SUITE``, ``compare A B``.

``run SUITE [--quick]`` writes ``benchmarks/results/SUITE/MACHINE.json``, or with ``--json`` prints
it and writes nothing. Other people's cases: ``--models FILE`` (functions that return models, as
the command line takes them), ``--data DIR`` (tables in the columns of data/published). ``fetch``
brings tables that do not ship from their source. ``pages`` fills docs/accuracy.md and
docs/speed.md from the results that are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Modules of this folder import each other by bare names, also in processes that they start.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])

from options import Options, answer_of
from pages import fill_pages
from published_data import DamagedTableError, FetchError, elsewhere, fetch, shipped_tables
from records import in_child
from results import (
    FOLDER,
    Result,
    ResultError,
    canary_s,
    compare,
    failed,
    machine_here,
    result_of,
    text_of,
)
from suites import SUITES, Part, Suite

from estimator.errors import EstimatorError

ANY_MACHINE = "any-machine"


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listed = commands.add_parser("list", help="the suites, each with its question")
    listed.set_defaults(call=_list)
    run = commands.add_parser("run", help="run a suite and keep what it finds")
    run.add_argument("suite", choices=SUITES, metavar="SUITE")
    run.add_argument("--quick", action="store_true", help="a subset, in minutes")
    run.add_argument("--json", action="store_true", help="print the result, write nothing")
    run.add_argument("--only", nargs="+", default=(), help="cases whose names hold such a text")
    run.add_argument("--models", type=Path, help="a file of functions that return models")
    run.add_argument("--data", type=Path, help="a folder of tables instead of data/published")
    run.add_argument("--out", type=Path, default=FOLDER, help="the folder of results")
    run.set_defaults(call=_run)
    fetched = commands.add_parser("fetch", help="bring tables that do not ship from their source")
    fetched.add_argument("table", nargs="?", metavar="TABLE", help="one of those listed without it")
    fetched.add_argument("--from", dest="url", help="where the table itself is kept, a URL or path")
    fetched.add_argument("--out", type=Path, help="a folder other than build/published")
    fetched.set_defaults(call=_fetch)
    compared = commands.add_parser("compare", help="say what changed between two results")
    compared.add_argument("before", type=Path, metavar="A")
    compared.add_argument("after", type=Path, metavar="B")
    compared.set_defaults(call=_compare)
    pages = commands.add_parser("pages", help="write docs/accuracy.md and docs/speed.md again")
    pages.set_defaults(call=_pages)
    options = parser.parse_args(words)
    return options.call(options)


def _list(options: argparse.Namespace) -> int:
    for name, suite in SUITES.items():
        more = [f"needs {'root' if suite.needs == 'root' else 'a GPU'}"] if suite.needs else []
        more += [f"--{option}" for option in sorted(suite.takes)]
        print(f"{name:<12} {suite.question}" + (f" ({', '.join(more)})" if more else ""))
    return 0


def _run(options: argparse.Namespace) -> int:
    suite = SUITES[options.suite]
    given = {name: getattr(options, name) for name in ("data", "models") if getattr(options, name)}
    for name, path in given.items():
        if name not in suite.takes:
            failed(f"{options.suite} takes no --{name}; 'python -m benchmarks list' says what does")
        if not path.exists():
            failed(f"--{name} {path} does not exist")
    if suite.needs == "root" and os.geteuid() != 0:
        failed(f"{options.suite} joins network namespaces, which needs root")
    before_s = canary_s() if suite.times else None
    told = {"quick": options.quick, "only": tuple(options.only), **given}
    answers = [
        (part.name, _answer(part, told)) for part in _parts(suite, given.keys(), options.quick)
    ]
    if not any(answer.get("cases", answer.get("report")) for _, answer in answers):
        failed(
            f"{options.suite} has no such case; 'python -m benchmarks run' without --only has all"
        )
    result = result_of(
        options.suite,
        answers,
        machine=machine_here() if suite.times else ANY_MACHINE,
        quick=options.quick,
        canary={"before_s": before_s, "after_s": canary_s()} if before_s else None,
    )
    if options.json:
        print(json.dumps(asdict(result), allow_nan=False))
    else:
        print(text_of(result))
        print(f"\nwritten to {result.save(options.out)}")
    return 0


def _parts(suite: Suite, given: Collection[str], quick: bool) -> list[Part]:
    """The parts to run: those that take what was given, all where nothing was."""
    return [
        part for part in suite.parts if not (quick and part.is_slow) and set(given) <= part.takes
    ]


def _answer(part: Part, told: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a part finds, in a process of its own."""
    here = Path(__file__).resolve().parent
    work = here.parent / "build" / part.name
    work.mkdir(parents=True, exist_ok=True)
    options = Options(work=work, **told)
    try:
        return in_child(answer_of, part.name, options)  # type: ignore[no-any-return]
    except (EstimatorError, FileNotFoundError) as error:
        failed(f"{part.name}: {error}")


def _fetch(options: argparse.Namespace) -> int:
    folder = options.out or shipped_tables()
    if options.table is None:
        for name, table in elsewhere().items():
            kept = ", fetched" if (folder / f"{name}.csv").exists() else ""
            print(f"{name:<14} {table['what']} ({table['rows']} rows{kept})")
            print(f"{'':<14} {table['source']}; licence {table['license']}")
        return 0
    if options.table not in elsewhere():
        failed(f"no table {options.table} is fetched; 'python -m benchmarks fetch' lists those")
    try:
        print(f"written to {fetch(options.table, folder, from_url=options.url)}")
    except (DamagedTableError, FetchError) as error:
        failed(str(error))
    return 0


def _compare(options: argparse.Namespace) -> int:
    try:
        print(compare(Result.load(options.before), Result.load(options.after)))
    except ResultError as error:
        failed(str(error))
    return 0


def _pages(options: argparse.Namespace) -> int:
    changed = fill_pages(Path(__file__).resolve().parents[1])
    print("\n".join(changed) or "nothing changes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
