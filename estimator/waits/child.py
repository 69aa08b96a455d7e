"""Run a training script as its own main program under the hooks that time it.

``python -m estimator.waits.child OPTIONS``, one JSON object in URL-safe base64. The record goes to
stdout, which also comes back from another node.
"""

from __future__ import annotations

import base64
import json
import os
import runpy
import signal
import sys
from pathlib import Path

from estimator.probe.devices.inventory import pinned
from estimator.waits.hooks import ScriptEndsError, Watched, install
from estimator.waits.runs import STOPPED


def main() -> None:
    """Run the script to the last step asked for, or to its end."""
    options = json.loads(base64.urlsafe_b64decode(sys.argv[1]))
    script = options["script"]
    os.chdir(options["folder"])
    watched = Watched(
        steps=options["steps"],
        warmup=options["warmup"],
        is_synthetic=options["is_synthetic"],
        is_profiled=options["is_profiled"],
        out=os.dup(1),  # also where the script puts another in its place
    )
    install(watched)

    def stop(*_: object) -> None:
        watched.write()
        os._exit(STOPPED)

    signal.signal(signal.SIGTERM, stop)
    sys.argv = [script, *options["arguments"]]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        with pinned(options["cores"]):
            runpy.run_path(script, run_name="__main__")
    except ScriptEndsError:
        # Nothing of the script is left to do, and process groups may wait for each other.
        os._exit(0)
    watched.write()


if __name__ == "__main__":
    main()
