"""The checks of pages and of the site find what they are for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import check_docs
import check_site
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


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
