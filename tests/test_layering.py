"""The package's structure: imports as import_contracts.toml says, nothing too long to read."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from estimator.workload import Strategy, StrategyKind

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "estimator").rglob("*.py"))
MOST_LINES_OF_MODULE, MOST_LINES_OF_FUNCTION = 700, 60


def test_every_import_contract_is_kept() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    found = subprocess.run(
        [linter, "--no-cache", "--no-logo", "--config", "tests/import_contracts.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_functions_can_be_read_in_one_go(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES_OF_MODULE
    functions = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {n: count for n, count in lengths.items() if count > MOST_LINES_OF_FUNCTION} == {}


# Where a strategy is known by its name; all others ask what is true of it.
KNOWS_STRATEGIES = ("workload/strategies.py", "timeline/strategies/")
STRATEGY_CLASSES = {"Strategy", *(each.__name__ for each in Strategy.__subclasses__())}
STRATEGY_NAMES = set(get_args(StrategyKind))


def _asks_which_strategy(node: ast.AST) -> bool:
    """Whether a comparison, match or isinstance tells strategies apart by name or class."""
    if isinstance(node, ast.Compare | ast.Match):
        parts = list(ast.walk(node) if isinstance(node, ast.Compare) else ast.walk(node.subject))
        kinds = [n for n in parts if isinstance(n, ast.Attribute) and n.attr == "kind"]
        named = any(isinstance(n, ast.Constant) and n.value in STRATEGY_NAMES for n in parts)
        return any(named or ast.unparse(n.value).endswith("strategy") for n in kinds)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        classes = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
        return bool(classes & (STRATEGY_CLASSES - {"Strategy"}))
    return False


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ("strategy.kind == 'fsdp'", True),
        ("shape.strategy.kind not in _NAMES", True),
        ("each.kind in ('ddp', 'ps')", True),
        ("match strategy.kind:\n    case _:\n        pass", True),
        ("device.kind == 'cpu'", False),
        ("strategy.keeps.state == 'shard'", False),
        ("isinstance(text, Strategy)", False),
    ],
)
def test_asking_which_strategy_it_is_is_recognised(code: str, asks: bool) -> None:
    assert any(_asks_which_strategy(node) for node in ast.walk(ast.parse(code))) is asks


def test_facts_of_a_strategy_are_asked_and_not_which_one_it_is() -> None:
    asking = [
        f"{name}:{node.lineno}"
        for path in MODULES
        if not (name := path.relative_to(ROOT / "estimator").as_posix()).startswith(
            KNOWS_STRATEGIES
        )
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare | ast.Match | ast.Call) and _asks_which_strategy(node)
    ]
    assert asking == []


def test_each_class_name_stands_once() -> None:
    names = Counter(
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    # Each framework's callback has the name that the documentation of both tells people to import.
    assert {name for name, count in names.items() if count > 1} == {"EstimatorCallback"}
