"""What runs the checks and the demo: nothing of its surroundings decides how they end."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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
