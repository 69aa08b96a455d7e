"""Trace and estimate the set-ups of user_setups.py and user_steps.py as users would.

By the command line, each must be answered unchanged, or refused by a sentence that names the change
(REFUSED). Run it in an environment with the packages that the set-ups name; what is not installed
is listed as left out.

    python benchmarks/user_models.py [--only NAME ...] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coverage import define_torchvision_schemas

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
ALLOCATION = "1x2:a100-sxm-40gb"
# What the sentence must name for those that cannot be answered as they are.
REFUSED = {
    "lightning_gan": "step(models, batch)",
    "no_loss": "give the loss",
    "no_batch": "return (model, batch)",
    "optimizer_too": "--optimizer",
    "models_without_step": "return (models, batch, step)",
    "only_a_trainer": "return (model, batch)",
    "loss_class": "write CrossEntropyLoss()",
    "step_that_logs": "leave out what reads it, such as .item()",
}


def main() -> None:
    """Run the set-ups asked for and print one line each; exit code 1 where one is neither."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    define_torchvision_schemas()
    found: dict[str, tuple[str, str]] = {}
    for name in options.only or setups():
        status, said = found[name] = run(name)
        print(f"{name:<28} {status:<9} {said}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(found))
    else:
        print(", ".join(f"{count} {status}" for status, count in counts(found).items()))
    sys.exit(any(status == "failed" for status, _ in found.values()))


def counts(found: dict[str, tuple[str, str]]) -> dict[str, int]:
    """How many set-ups ended how."""
    ends = [status for status, _ in found.values()]
    return {status: ends.count(status) for status in dict.fromkeys(ends)}


def setups() -> dict[str, Callable[[], Any]]:
    """Every set-up by its name, in the order of the files."""
    import user_setups
    import user_steps

    return {
        name: value
        for module in (user_setups, user_steps)
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


def run(name: str) -> tuple[str, str]:
    """(answered, refused, left out or failed; what was said) of one set-up."""
    code, out, err = ask(name)
    if code == 0:
        return ("answered" if name not in REFUSED else "failed"), out.splitlines()[1]
    if "ModuleNotFoundError" in err:
        return "left out", err
    is_one_sentence = code == 2 and "\n" not in err
    return ("refused" if is_one_sentence and REFUSED.get(name, "\n") in err else "failed"), err


def ask(name: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command line asked about one set-up."""
    from estimator.cli.main import main as command

    path = inspect.getfile(setups()[name])
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command(["estimate", f"{path}:{name}", "--on", ALLOCATION])
        except SystemExit as end:
            return int(end.code or 0), out.getvalue().strip(), err.getvalue().strip()


if __name__ == "__main__":
    main()
