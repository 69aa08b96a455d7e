"""Probe this machine and write its profile: ``python -m estimator.probe [FILE]``."""

from __future__ import annotations

import sys
from pathlib import Path

from estimator.errors import EstimatorError
from estimator.probe.machine import probe_machine
from estimator.profile import home


def main(arguments: list[str]) -> int:
    """Probe with the default budget; the profile goes to FILE or to the user's store."""
    path = Path(arguments[0]) if arguments else home() / "machines" / "local.json"

    def report(part: str, fraction: float) -> None:
        print(f"\r{100 * fraction:3.0f} % {part:40}", end="", file=sys.stderr, flush=True)

    try:
        profile = probe_machine(report=report)
        profile.save(path)
    except EstimatorError as error:
        print(f"\n{error}", file=sys.stderr)
        return 2
    print(file=sys.stderr)
    for part in profile.missing:
        print(f"not measured: {part}", file=sys.stderr)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
