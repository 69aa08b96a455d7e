"""The command that writes a Slurm job script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from estimator.cli.console import print_json, print_text, remark
from estimator.cli.options import on_option, traced, workload_options
from estimator.cli.request import Request
from estimator.probe.option_types import Amount
from estimator.units import MIB


@click.command()
@workload_options
@on_option
@click.option("--samples", type=Amount(), help="How much is trained.")
@click.option("--tokens", type=Amount(), help="How much is trained.")
@click.option(
    "--margin", type=Amount(least=1.0), default=1.25, help="On the time limit; default 1.25."
)
@click.option(
    "--sinfo",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Partitions to choose from: what sinfo -h -o '%R|%l|%D|%G' wrote.",
)
@click.option("--run", "command", default="train.py", help="What torchrun runs; default train.py.")
@click.option("--json", "as_json", is_flag=True, help="Print base units, unrounded.")
def slurm(
    on: str,
    samples: float | None,
    tokens: float | None,
    margin: float,
    sinfo: Path | None,
    command: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Print a Slurm job script for training MODEL, with --nodes, --gres and --time.

    The time limit is the upper end of the estimate's interval times --margin.
    """
    import shlex

    from estimator.errors import ImportedFileError
    from estimator.files import read_text
    from estimator.schedulers.slurm import job_script, partition_for, read_sinfo, time_text

    if (samples is None) == (tokens is None):
        raise click.UsageError("give --samples or --tokens, from which the time limit follows")
    try:
        words = shlex.split(command)
        partitions = None if sinfo is None else read_sinfo(read_text(sinfo, most_bytes=MIB))
    except OSError as error:
        raise ImportedFileError(f"cannot read {sinfo} ({error.strerror}); check --sinfo") from None
    except ValueError as error:
        if isinstance(error, ImportedFileError):
            raise
        raise click.UsageError(f"--run cannot be split into words ({error})") from None
    request = Request(**options)
    answer = request.estimate(traced(request, (on,)), on)
    upper_ratio = answer.high_s / answer.step_time_s
    time_s = answer.duration_s(samples=samples, tokens=tokens) * upper_ratio * margin
    partition = None
    if partitions is not None:
        nodes = answer.allocation.nodes
        gpus = max(group.devices_per_node for group in answer.allocation.groups)
        partition = partition_for(partitions, nodes=nodes, gpus=gpus, time_s=time_s)
    script = job_script(answer, time_s=time_s, command=words, partition=partition)
    if as_json:
        more = {"partition": partition.name if partition else None, "time_s": time_s}
        print_json({"script": script, "time": time_text(time_s)} | more)
        return
    if answer.fits == "no":
        remark(f"{answer.model} does not fit into the memory of {answer.allocation}")
    print_text(script)
