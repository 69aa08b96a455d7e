"""What the README names is there: commands, their options, files, links and names of the API."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import click
import pytest
from suites import SUITES

import estimator as est
from estimator.cli.estimate import Stalls
from estimator.cli.main import commands

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
COMMANDS = sorted(set(re.findall(r"(?:^ *\$ |`)(estimator [a-z][^`\n]*)", README, re.MULTILINE)))
TARGETS = re.findall(r"\]\((?!https://)([^)]+)\)", README)


def test_the_readme_is_short_and_begins_with_what_for_whom_a_command_and_a_picture() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    first_screen = "\n".join(lines[:26])
    assert "How fast would this model train" in first_screen
    assert "authors of schedulers" in first_screen
    assert "$ estimator estimate " in first_screen
    assert "![" in first_screen


def test_the_readme_counts_the_machines_that_ship() -> None:
    shipped = len(list((ROOT / "data" / "machines").glob("*.json")))
    assert f"\n{shipped} machines ship with the package" in README


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_of_the_readme_is_one(text: str) -> None:
    # Without the other commands of a row: "machines list, show NAME".
    words = shlex.split(text)[1:]
    command: click.Command = commands
    while isinstance(command, click.Group):
        if isinstance(command, Stalls) and words[0] not in command.commands:
            break
        found = command.get_command(click.Context(command), words.pop(0))
        assert found is not None, text
        command = found
        if isinstance(command, click.Group) and not words:
            return
    if isinstance(command, Stalls):
        command = command.commands["predict"]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known


@pytest.mark.parametrize("target", TARGETS)
def test_a_link_of_the_readme_leads_somewhere(target: str) -> None:
    path, _, section = target.partition("#")
    assert (ROOT / path).is_file()
    if section:
        titles = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
        assert section in {re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") for title in titles}


def test_scripts_suites_and_targets_that_the_readme_names_are_there() -> None:
    scripts = re.findall(r"\b((?:benchmarks|tools|examples)/\w+\.py)", README)
    assert [name for name in scripts if not (ROOT / name).is_file()] == []
    suites = re.findall(r"python -m benchmarks run (\w+)", README)
    assert suites
    assert set(suites) <= set(SUITES)
    targets = set(re.findall(r"(?:`|^ +)make ([a-z-]+)", README, re.MULTILINE))
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets
    assert targets <= made


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_python_of_a_page_is_python_and_its_names_are_of_the_api(page: Path) -> None:
    text = page.read_text()
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("estimator"):
                path = ROOT / f"{str(node.module).replace('.', '/')}.py"
                assert all(f" {name.name}" in path.read_text() for name in node.names)
    for name in re.findall(r"\best\.(\w+)", text):
        assert hasattr(est, name), name
    for name in re.findall(r"\bestimator((?:\.[a-z_]+)+)\.([A-Z]\w+)", text):
        assert hasattr(importlib.import_module(f"estimator{name[0]}"), name[1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_of_the_readme_stands_in_a_page_too(page: Path) -> None:
    def sentences(text: str) -> set[str]:
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        found = re.split(r"(?<=[.:;])\s", " ".join(prose.split()))
        return {each for each in found if len(each) > 80}

    assert sentences(README) & sentences(page.read_text()) == set()
