"""Install the wheel of a folder without extras in an empty environment, and use it there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_MODEL = """
import torch
from torch import nn


def small():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(8, 64)
"""
_CODE = """
import estimator as est
from pathlib import Path
assert "site-packages" in est.__file__, est.__file__
assert Path(est.__file__).with_name("py.typed").is_file()
graph = est.OpGraph.load("small.graph")
answer = est.estimate(graph, "2x8:h100-sxm")
assert answer.step_time_s > 0
assert "step time" in answer._repr_html_()
assert len(est.estimate_many(graph, ["1x1:t4-g4dn", "2x4:t4-g4dn"])) == 2
print(est.__version__, answer)
"""
# What needs an extra says so in one sentence, with exit code 2.
_REFUSED = {
    (
        "report",
        "small.graph",
        "--on",
        "1x1:t4-g4dn",
        "-o",
        "r.html",
    ): "throughput-estimator[report]",
    ("serve",): "throughput-estimator[serve]",
}


def main() -> None:
    """Raise where anything fails."""
    (wheel,) = Path(sys.argv[1]).resolve().glob("*.whl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        constraints = ROOT / "constraints.txt"
        quick = ("--quiet", "--no-compile")
        install = [python, "-m", "pip", "install", *quick, wheel, "-c", constraints]
        subprocess.run(install, check=True)
        (folder / "model.py").write_text(_MODEL)
        environment = {"PATH": os.environ["PATH"], "HOME": name, "ESTIMATOR_HOME": f"{name}/home"}

        def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                words, cwd=folder, env=environment, capture_output=True, text=True
            )

        command = python.with_name("estimator")
        for words in (
            ("--version",),
            ("--help",),
            ("trace", "model.py:small", "-o", "small.graph"),
            ("estimate", "model.py:small", "--on", "1x4:t4-g4dn"),
            ("sweep", "small.graph", "--on", "1..2x4:t4-g4dn"),
            ("slurm", "small.graph", "--on", "1x4:t4-g4dn", "--samples", "1e6"),
            ("machines", "list"),
        ):
            ended = run(command, *words)
            if ended.returncode:
                sys.exit(f"estimator {' '.join(words)}: {ended.stderr}")
        for words, said in _REFUSED.items():
            ended = run(command, *words)
            if ended.returncode != 2 or said not in ended.stderr or "Traceback" in ended.stderr:
                sys.exit(f"estimator {' '.join(words)}: {ended.stderr}")
        ended = run(python, "-c", _CODE)
        if ended.returncode:
            sys.exit(ended.stderr)
        print(ended.stdout, end="")


if __name__ == "__main__":
    main()
