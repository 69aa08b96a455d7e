"""The package's structure: imports as import_contracts.toml says, nothing too long to read."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from estimator.workload.strategies import Strategy

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


def test_each_folder_can_be_taken_in_at_a_glance() -> None:
    assert len([path for path in MODULES if path.parent == ROOT / "estimator"]) <= 11
    files = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert {str(folder): count for folder, count in files.items() if count > 15} == {}


def test_few_modules_are_half_an_idea() -> None:
    ideas = [path for path in MODULES if path.name not in ("__init__.py", "__main__.py")]
    short = [path for path in ideas if len(path.read_text(encoding="utf-8").splitlines()) < 60]
    assert len(short) < len(ideas) / 10, short


# Where a strategy is known as such; all others ask what is true of it.
KNOWS_STRATEGIES = ("workload/strategies.py", "timeline/strategies/")
# What trains for real has to pass options on, to one strategy's own wrapper each.
PASSES_OPTIONS = (*KNOWS_STRATEGIES, "validate/training.py")


def _strategy_classes(kind: type[Strategy] = Strategy) -> set[type[Strategy]]:
    return set().union(*({each} | _strategy_classes(each) for each in kind.__subclasses__()))


STRATEGY_CLASSES = {kind.__name__ for kind in _strategy_classes()}
STRATEGY_NAMES = {kind.name for kind in _strategy_classes() if kind.name}
STRATEGY_OPTIONS = {option.name for kind in _strategy_classes() for option in fields(kind)}


def _asks_which_strategy(node: ast.AST) -> bool:
    """Whether a comparison, match or isinstance tells strategies apart by name or class."""
    if isinstance(node, ast.Compare | ast.Match):
        parts = list(ast.walk(node) if isinstance(node, ast.Compare) else ast.walk(node.subject))
        names = [n for n in parts if isinstance(n, ast.Attribute) and n.attr in ("kind", "name")]
        named = any(isinstance(n, ast.Constant) and n.value in STRATEGY_NAMES for n in parts)
        return any(named or ast.unparse(n.value).endswith("strategy") for n in names)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        classes = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
        return bool(classes & STRATEGY_CLASSES)
    return False


def _reads_option(node: ast.AST) -> bool:
    """Whether an option that only some strategies have is read of a strategy."""
    if isinstance(node, ast.Attribute) and node.attr in STRATEGY_OPTIONS:
        owner = ast.unparse(node.value).removesuffix("()")
        return owner.endswith(("strategy", "Strategy.parse")) or "Strategy.parse(" in owner
    return False


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ("strategy.name == 'fsdp'", True),
        ("shape.strategy.name not in _NAMES", True),
        ("each.name in ('ddp', 'ps')", True),
        ("match strategy.name:\n    case _:\n        pass", True),
        ("isinstance(strategy, FSDP)", True),
        ("shape.strategy.offload", True),
        ("Strategy.parse(text).param or 'fp32'", True),
        ("device.kind == 'cpu'", False),
        ("strategy.keeps.state == 'shard'", False),
        ("isinstance(text, Strategy)", False),
        ("hook.param", False),
    ],
)
def test_asking_which_strategy_it_is_is_recognised(code: str, asks: bool) -> None:
    nodes = list(ast.walk(ast.parse(code)))
    assert any(_asks_which_strategy(node) or _reads_option(node) for node in nodes) is asks


def test_facts_of_a_strategy_are_asked_and_not_which_one_it_is() -> None:
    asking = [
        f"{name}:{node.lineno}"
        for path in MODULES
        for name in (path.relative_to(ROOT / "estimator").as_posix(),)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (not name.startswith(KNOWS_STRATEGIES) and _asks_which_strategy(node))
        or (not name.startswith(PASSES_OPTIONS) and _reads_option(node))
        if isinstance(node, ast.stmt | ast.expr)
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
