"""What the README names is there: commands, their options, files, links and names of the API."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import check_docs
import check_site
import click
import pytest
import yaml
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


def test_a_page_agrees_but_for_its_numbers() -> None:
    page = "```console\n$ echo 'step time  41 ms ± 6.1 %'\nstep time 9 ms ± 10 %\n```\n"
    text, blocks, wrong = check_docs.rerun(page)
    assert (blocks, wrong) == (1, [])
    assert text == page.replace("step time 9 ms ± 10 %", "step time  41 ms ± 6.1 %")


def test_another_output_is_told_with_what_differs() -> None:
    _, _, (said,) = check_docs.rerun("```console\n$ echo fits\ndoes not fit\n```\n")
    assert "-does not fit" in said
    assert "+fits" in said


def test_only_the_first_lines_are_compared_where_a_page_shows_them() -> None:
    page = "<!-- lines=1 -->\n```console\n$ printf 'one\\ntwo\\n'\none\n```\n"
    assert check_docs.rerun(page) == (page, 1, [])


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_blocks_of_code_begin_as_the_site_reads_them(page: Path) -> None:
    # Anything after the language, as in "console lines=3", leaves a block that is shown as text and
    # takes what follows it into the next one.
    fences = [line for line in page.read_text().splitlines() if line.lstrip().startswith("```")]
    assert [line for line in fences if not re.fullmatch(r" *```[a-z]*", line)] == []
    assert len(fences) % 2 == 0


def test_commands_of_a_page_share_a_folder() -> None:
    page = "```console\n$ echo held > file\n```\n\n```console\n$ cat file\nheld\n```\n"
    assert check_docs.rerun(page)[1:] == (2, [])


def test_what_a_site_loads_from_other_hosts_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        '<link rel="canonical" href="https://a.example/"><a href="https://b.example">b</a>'
        '<script src="//c.example/x.js"></script><img src="flow.svg">'
        '<link rel="stylesheet" href="https://d.example/x.css">'
    )
    (tmp_path / "x.css").write_text("@import 'https://e.example/y.css'; a { b: url(z.png) }")
    assert check_site.external(tmp_path) == [
        "page.html: //c.example/x.js",
        "page.html: https://d.example/x.css",
        "x.css: https://e.example/y.css",
    ]


def test_what_is_released_as_source_has_all_that_its_tests_import() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    included = set(project["hatch"]["build"]["targets"]["sdist"]["include"])
    pytest_options = project["pytest"]["ini_options"]
    assert {*pytest_options["testpaths"], *pytest_options["pythonpath"]} - {"."} <= included


def test_every_page_stands_in_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]

    def pages(entries: list[dict[str, object]]) -> set[str]:
        found: set[str] = set()
        for entry in entries:
            for value in entry.values():
                found |= pages(value) if isinstance(value, list) else {str(value)}
        return found

    assert pages(nav) == {path.name for path in (ROOT / "docs").glob("*.md")}


RUN = Path(__file__).parents[1] / ".ci" / "run"
NEVER = {"PWD", "OLDPWD", "SHLVL", "_"}  # set by the shells themselves


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    "kept",
    [
        {},
        {"HOME": "/home/me", "TERM": "xterm", "LANG": "C.UTF-8", "CI": "true"},
        {"PIP_INDEX_URL": "https://one two", "https_proxy": "http://p", "NO_PROXY": "a,b"},
        {"SSL_CERT_FILE": "/a", "SSL_CERT_DIR": "/b", "CURL_CA_BUNDLE": "/c\nd"},
    ],
)
def test_checks_run_without_variables_that_happen_to_be_set(
    kept: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(RUN, tmp_path / ".ci" / "run")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text('#!/bin/sh\necho "$@" > arguments\nenv -0 > environment\n')
    make.chmod(0o755)
    kept = {**kept, "PATH": f"{make.parent}:{os.environ['PATH']}"}
    happening = {"PYTHONUNBUFFERED": "1", "MALLOC_MMAP_MAX_": "0", "MYPIP_X": "1", "EMPTY": ""}
    subprocess.run([tmp_path / ".ci" / "run"], env={**kept, **happening}, check=True)
    assert (tmp_path / "arguments").read_text() == "lint test\n"
    pairs = (tmp_path / "environment").read_text().rstrip("\0").split("\0")
    found = dict(pair.split("=", 1) for pair in pairs)
    assert {name: value for name, value in found.items() if name not in NEVER} == kept


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("command_name", ["probe", "validate"])
@pytest.mark.parametrize(("code", "demo_code"), [(0, 0), (1, 0), (2, 2), (130, 2)])
def test_the_demo_ends_well_where_the_answer_is_no_and_badly_where_a_command_fails(
    command_name: str, code: int, demo_code: int, tmp_path: Path
) -> None:
    shutil.copy(RUN.parents[1] / "Makefile", tmp_path)
    command = tmp_path / ".venv" / "bin" / "estimator"
    command.parent.mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", ".venv/.installed"):
        (tmp_path / name).touch()
    command.write_text(
        f'#!/bin/sh\necho "$@" >> asked\ntest "$1" != {command_name} || exit {code}\n'
    )
    command.chmod(0o755)
    ended = subprocess.run(["make", "demo"], cwd=tmp_path, capture_output=True, check=False)
    assert ended.returncode == demo_code, ended.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    # Nothing is to be told to probe a busy machine.
    assert asked[0] == "probe"
    assert asked[-1].startswith(command_name if demo_code else "validate")
