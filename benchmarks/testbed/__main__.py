"""Build, use and clean up testbeds from the command line."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from estimator.errors import EstimatorError
from estimator.units import format_ratio, format_seconds

from . import __doc__ as manual
from . import slow
from .description import TestbedDescription
from .launch import launch
from .network import remove_stale, testbed, unavailable_reason

_ENDING = {signal.SIGINT, signal.SIGTERM}


def up(options: argparse.Namespace) -> None:
    """Hold a testbed up until a signal comes, and say how to enter its nodes."""
    with testbed(TestbedDescription.load(options.file)) as bed:
        for node in bed.description.nodes:
            print(
                f"{node.name}: {bed.address(node.name)}, ip netns exec {bed.namespace(node.name)}"
            )
        print("Ctrl-C takes it down", flush=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        signal.sigwait(_ENDING)


def run(options: argparse.Namespace) -> None:
    """Run a command once per rank and print what each printed."""
    description = TestbedDescription.load(options.file)
    with testbed(description) as bed:
        allocation = options.on or description.all_devices()
        outputs = launch(bed, allocation, options.command, timeout_s=options.timeout)
    for rank, output in enumerate(outputs):
        print("".join(f"[{rank}] {line}\n" for line in output.splitlines()), end="")


def train(options: argparse.Namespace) -> None:
    """Train a model and print its step time, with and without merging gradients."""
    from .measure import measure

    description = TestbedDescription.load(options.file)
    with testbed(description) as bed:
        for merges in (True, False):
            found = measure(
                bed,
                options.model,
                options.on or description.all_devices(),
                batch=options.batch,
                strategy=options.strategy,
                accumulation_steps=options.accumulation,
                merges_gradients=merges,
                timeout_s=options.timeout,
            )
            print(
                f"{options.strategy if merges else 'no sync'}: {format_seconds(found.step_s)} "
                f"± {format_ratio(found.spread_ratio)} a step"
            )


def clean(_: argparse.Namespace) -> None:
    """Remove what is left of testbeds whose owner has died."""
    reason = unavailable_reason()
    if reason is not None:
        raise SystemExit(reason)
    slow.remove_stale()
    removed = remove_stale()
    print(f"removed {len(removed)} testbeds" if removed else "nothing was left behind")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; raises SystemExit with argparse's message."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.testbed",
        description=manual,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    for function in (up, run, train, clean):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.set_defaults(function=function)
        if function is not clean:
            command.add_argument("file", type=Path, help="the description of the testbed")
        if function in (run, train):
            command.add_argument("--on", help="allocation such as n0[0,1]+n1[0]; default: all")
            command.add_argument("--timeout", type=float, default=600.0, help="seconds")
        if function is run:
            command.add_argument("command", nargs="+", help="after --, what each rank runs")
        if function is train:
            command.add_argument("model", help="paced:NAME or any MODEL text")
            command.add_argument("--batch", type=int, help="samples per rank and micro-batch")
            command.add_argument("--strategy", default="ddp")
            command.add_argument("--accumulation", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; one sentence and status 2 if it cannot be done."""
    # A testbed is taken down on the way out, also when it is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parse_options(arguments)
    try:
        options.function(options)
    except EstimatorError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
