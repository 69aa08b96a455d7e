"""The command line: parses, calls, prints; computes nothing.

torch takes seconds to import, so each command imports what it needs when it runs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from estimator.cli.calibrate import calibrate
from estimator.cli.choices import layouts, order, rent
from estimator.cli.console import (
    INTERRUPTED,
    WRONG_INPUT,
    forget_odd_sizes,
    print_text,
    remark,
)
from estimator.cli.estimate import estimate, memory, stalls, sweep, trace, validate
from estimator.cli.machines import machines, probe
from estimator.cli.replay import replay
from estimator.cli.report import report, serve, slurm
from estimator.errors import EstimatorError


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; wrong input ends with one sentence on stderr and exit code 2."""
    if sys.stdout is None:
        sys.exit(_refuse("stdout is closed, so nothing can be printed; redirect it to a file"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal or pipe without Unicode gets '?' rather than a traceback.
            stream.reconfigure(errors="replace")
    _quieten_libraries()
    forget_odd_sizes()
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except OSError as error:
        code = _refuse(f"cannot write the output ({error.strerror}); free space or choose a file")
        _end_output()
    sys.exit(code or 0)


def _run(arguments: Sequence[str] | None) -> int | None:
    try:
        code: int | None = commands.main(arguments, prog_name="estimator", standalone_mode=False)
    except click.ClickException as error:
        code = _refuse(error.format_message())
    except EstimatorError as error:
        code = _refuse(str(error))
    except (ArithmeticError, MemoryError, RecursionError) as error:
        # What no check has met; the input is none that can be computed with.
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        code = _refuse(
            f"the input leads to what cannot be computed ({reason}); correct its numbers"
        )
    except (click.Abort, KeyboardInterrupt):
        print_text("estimator: interrupted", err=True)
        code = INTERRUPTED
    return code


def _end_output() -> None:
    """Write what stdout still holds or drop it: Python would fail to write it at its own end."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _quieten_libraries() -> None:
    # Their remarks would stand between ours on stderr; what fails reaches us as an exception.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Disabled, since importing torch resets the levels of its loggers.
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True


def _refuse(message: str) -> int:
    remark(message)
    return WRONG_INPUT


# Names of the release before, and what to write now.
_MOVED = {
    "check": "part of 'estimator estimate --verbose', and of its --json",
    "plan": "'estimator layouts MODEL --on …' and 'estimator rent MODEL --machines …'",
    "profile": "'estimator machines list|show|compare|merge|import|schema'",
}


class Overview(click.Group):
    """The commands on one screen of 24 lines; the usage line names the two options."""

    def format_help(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(context, formatter)
        self.format_help_text(context, formatter)
        self.format_commands(context, formatter)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """A command by its name; of the release before, where it is now."""
        if name in _MOVED:
            raise click.UsageError(f"'estimator {name}' is now {_MOVED[name]}")
        return super().get_command(context, name)


@click.group(
    cls=Overview,
    invoke_without_command=True,
    options_metavar="[-h] [--version]",
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="throughput-estimator", prog_name="estimator")
@click.pass_context
def commands(context: click.Context) -> None:
    """Predict how fast a PyTorch model trains on any devices. MODEL is as in train.py:model or
    hf:gpt2, ALLOCATION as in 2x8:h100-sxm ('estimator estimate -h' has all). Exit code 1: the
    answer is no, 2: wrong input.
    """
    if context.invoked_subcommand is None:
        print_text(context.get_help())


for command in (
    calibrate,
    estimate,
    layouts,
    machines,
    memory,
    order,
    probe,
    rent,
    replay,
    report,
    serve,
    slurm,
    stalls,
    sweep,
    trace,
    validate,
):
    commands.add_command(command)


if __name__ == "__main__":
    main()
