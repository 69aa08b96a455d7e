"""The scripts beside the package: no module imports itself, through whichever others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def modules(*folders: Path) -> dict[str, Path]:
    """Every module below the folders, by the name under which it is imported."""
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in folders
        for path in folder.rglob("*.py")
    }


def imported(name: str, path: Path) -> Iterator[str]:
    """What a module imports, at its top or inside functions."""
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def order(found: dict[str, Path]) -> tuple[str, ...]:
    """The modules, each after all that it imports; raises CycleError."""
    graph = {
        name: {*imported(name, path)} & (found.keys() - {name}) for name, path in found.items()
    }
    return tuple(TopologicalSorter(graph).static_order())


def test_benchmarks_and_tools_have_no_import_cycle() -> None:
    names = order(modules(ROOT / "benchmarks", ROOT / "tools"))
    assert names.index("records") < names.index("local_accuracy")
    assert names.index("testbed.description") < names.index("testbed.network")


def test_an_import_inside_a_function_counts(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import two\n")
    (tmp_path / "two.py").write_text("def late():\n    from one import name\n")
    with pytest.raises(CycleError):
        order(modules(tmp_path))


def test_what_benchmarks_and_tools_import_of_the_package_is_there() -> None:
    """Also inside functions, which run only when somebody runs the suite."""
    missing = []
    for path in sorted((*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tools").rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("estimator"):
                module = import_module(node.module or "")
                missing += [
                    f"{path.name}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(module, alias.name)
                    and find_spec(f"{node.module}.{alias.name}") is None
                ]
    assert missing == []
