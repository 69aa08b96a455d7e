"""Probe several nodes together: ``torchrun --nnodes N --nproc-per-node D -m estimator.probe``.

The same as ``estimator probe --together``.
"""

from __future__ import annotations

import importlib
import os
import sys


def main() -> None:
    """Run the command and end this process."""
    command_line = importlib.import_module("estimator.cli.main")
    code = 0
    try:
        command_line.main(["probe", "--together", *sys.argv[1:]])
    except SystemExit as ended:
        code = int(ended.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch's store may still run after an error, and would abort an orderly exit.
    os._exit(code)


if __name__ == "__main__":
    main()
