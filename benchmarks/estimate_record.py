"""Write down what this tree's package answers, or say how its answers differ from a record's.

``--write FILE`` asks every question; ``--check FILE`` asks them again and ends with 1 if an answer
is another one. Questions (`record/questions.txt`) are command lines, as a person types them, about
small models on machines of the catalogue and on one that is made up, and tables of many allocations
asked for from Python; other files of that folder are what they name.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from records import say

RECORD = Path(__file__).with_name("record")
# What `estimator trace` is told of each graph.
GRAPHS: dict[str, str] = json.loads((RECORD / "graphs.json").read_text(encoding="utf-8"))
_TABLE = re.compile(r"table (\S+) (\S+)")
# What a defect may raise; it is written down like a refusal, so that a record is always whole.
FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "100"}


def questions() -> list[str]:
    """Every question, once, in a fixed order."""
    return (RECORD / "questions.txt").read_text(encoding="utf-8").splitlines()


def recorded(is_wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The answer of every wanted question, from two processes that share nothing."""
    names = [name for name in questions() if is_wanted(name)]
    os.environ |= ENVIRONMENT
    with (
        tempfile.TemporaryDirectory(prefix="record-") as folder,
        ProcessPoolExecutor(
            2, mp_context=get_context("spawn"), initializer=_enter, initargs=(folder,)
        ) as pool,
    ):
        answers: dict[str, Any] = {}
        for name, answer in zip(names, pool.map(answered, names, chunksize=8), strict=True):
            answers[name] = answer
            if len(answers) % 100 == 0:
                say(f"{len(answers)} of {len(names)} answers")
    return answers


def _enter(folder: str) -> None:
    """Work in a folder of one's own."""
    from tests.synthetic import Machine

    own = shutil.copytree(RECORD, Path(folder, str(os.getpid())))
    os.environ["ESTIMATOR_HOME"] = str(own / "home")
    os.chdir(own)
    Machine().profile().save(own / "home" / "machines" / "synthetic.json")


def answered(name: str) -> Any:
    """What the package answers to a command line, or the columns of a table."""
    needed = ("gpt2-amp", "llama") if name.startswith("replay") else re.findall(r"[\w-]+", name)
    for graph in GRAPHS.keys() & set(needed):
        if not Path(f"{graph}.graph").exists():
            _run(f"trace {GRAPHS[graph]} -o {graph}.graph")
    if asked := _TABLE.fullmatch(name):
        try:
            return plain(_table(*asked.groups()))
        except FAILURES as error:
            return {"refused": f"{type(error).__name__}: {error}"}
    return plain(_run(name))


def _run(line: str) -> dict[str, Any]:
    """The exit code of a command and what it printed."""
    from estimator.cli.main import main

    code: object = 0
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(shlex.split(line))
        except SystemExit as ended:
            code = ended.code
        except FAILURES as error:
            code = f"{type(error).__name__}: {error}"
    # Of files in the store the whole path is printed.
    text = out.getvalue().replace(os.getcwd(), ".")
    answer = {"code": code, "out": json.loads(text) if text.startswith(("{", "[")) else text}
    # Progress and remarks come with answers too, refusals alone are answers.
    return answer if code in (0, 1) else answer | {"refused": err.getvalue()}


def _table(graph: str, strategy: str) -> Any:
    """Drawn allocations of one to three groups of nodes."""
    import estimator as est

    draw = random.Random(f"{graph} {strategy}")
    machines = {"synthetic": 9} if graph.endswith("-cpu") else {"h100-sxm": 8, "t4-g4dn": 4}
    rows = [
        "+".join(
            f"{draw.choice((1, 2, 5, 40))}x{draw.randint(1, machines[name])}:{name}"
            for name in draw.choices(list(machines), k=draw.randint(1, 3))
        )
        for _ in range(60)
    ]
    batches = [draw.choice((1, 3, 8, 64)) for _ in rows]
    loaded = est.OpGraph.load(f"{graph}.graph")
    return est.estimate_many(loaded, rows, strategy=strategy, batch_per_gpu=batches).to_dict()


def plain(value: Any) -> Any:
    """A value as JSON has it; digits beyond the twelfth are those of the order of additions."""
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.12g}")
    return value if value is None or isinstance(value, str | int) else str(value)


_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_ABSENT = "absent"


class Difference(NamedTuple):
    """A key whose values differ; of two sentences with the same numbers only in their wording."""

    question: str
    key: str
    one: Any
    two: Any
    is_wording: bool = False


def differences(
    one: Mapping[str, Any], two: Mapping[str, Any], *, tolerance: float
) -> Iterator[Difference]:
    """Every key of every question whose answers differ, or that only one of them has."""
    for question in sorted({*one, *two}):
        pair = one.get(question, _ABSENT), two.get(question, _ABSENT)
        for key, first, second in _unequal("", *pair, tolerance, 0.0):
            yield Difference(question, key, first, second, _is_wording(first, second, tolerance))


def _unequal(
    key: str, one: Any, two: Any, tolerance: float, scale: float
) -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ; parts are compared against the largest of their kind beside them."""
    if isinstance(one, dict) and isinstance(two, dict):
        parts = {name: (one.get(name, _ABSENT), two.get(name, _ABSENT)) for name in {**one, **two}}
        largest: dict[str, float] = {}
        for name, pair in parts.items():
            unit = name.rpartition("_")[2]
            largest[unit] = max(largest.get(unit, 0.0), *map(_size, pair))
        for name, pair in parts.items():
            unit = name.rpartition("_")[2]
            yield from _unequal(f"{key}.{name}".lstrip("."), *pair, tolerance, largest[unit])
    elif isinstance(one, list) and isinstance(two, list):
        if len(one) != len(two):
            yield f"{key}.length", len(one), len(two)
        for number, pair in enumerate(zip(one, two, strict=False)):
            yield from _unequal(f"{key}.{number}", *pair, tolerance, scale)
    elif isinstance(one, float) and isinstance(two, int | float) and not isinstance(two, bool):
        if not abs(one - two) <= tolerance * max(scale, abs(one), abs(two)) and one == one:
            yield key, one, two
    elif one != two and not (one != one and two != two):
        yield key, one, two


def _size(value: Any) -> float:
    return abs(value) if isinstance(value, float) and abs(value) < float("inf") else 0.0


def _is_wording(one: Any, two: Any, tolerance: float) -> bool:
    if not (isinstance(one, str) and isinstance(two, str) and " " in one and " " in two):
        return False
    numbers = [[float(text) for text in _NUMBER.findall(each)] for each in (one, two)]
    return not [*_unequal("", *numbers, tolerance, 0.0)]


def report(found: list[Difference], *, most: int = 40) -> str:
    """The differences for people: the first of each kind of key, and how many there are."""
    lines = []
    for what, chosen in (
        ("answers", [each for each in found if not each.is_wording]),
        ("wordings", [each for each in found if each.is_wording]),
    ):
        kinds: dict[str, list[Difference]] = {}
        for each in chosen:
            kinds.setdefault(re.sub(r"\.\d+\b", ".*", each.key), []).append(each)
        questions = len({each.question for each in chosen})
        lines.append(f"{len(chosen)} {what} of {questions} questions differ")
        for kind, same in sorted(kinds.items(), key=lambda item: -len(item[1]))[:most]:
            first = same[0]
            lines.append(f"  {kind or 'answer'}: {len(same)}, such as {first.question}")
            lines.append(f"    {first.key}: {str(first.one)[:200]} → {str(first.two)[:200]}")
        if len(kinds) > most:
            lines.append(f"  and {len(kinds) - most} more keys")
    return "\n".join(lines)


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
