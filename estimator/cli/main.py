"""The command line: parses, calls, prints; computes nothing.

torch takes seconds to import, so each command imports what it needs when it runs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import click

from estimator.cli.calibrate import calibrate
from estimator.cli.console import (
    forget_odd_sizes,
    print_json,
    print_tables,
    printing_to_stderr,
    progress,
    remark,
    waiting,
)
from estimator.cli.options import Amount, Count
from estimator.cli.request import Request
from estimator.errors import EstimatorError, ModelError, ProfileError, UnknownMachineError
from estimator.workload import OPTIMIZERS, PRECISIONS

if TYPE_CHECKING:
    from estimator.calibrate.calibrator import Calibrator
    from estimator.estimates import Estimate
    from estimator.graph.ops import OpGraph
    from estimator.machines.profile import MachineProfile
    from estimator.placement.topology import Cluster

ANSWER_IS_NO, WRONG_INPUT, INTERRUPTED = 1, 2, 130
# A measurement this close counts as predicted even outside the interval (TARGETS A2, worst case).
TOLERATED_ERROR_RATIO = 0.25
# `check` fails if more of the time than this rests on datasheets and assumptions.
TOLERATED_UNMEASURED_RATIO = 0.1

Command = TypeVar("Command", bound=Callable[..., Any])


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
        click.echo("estimator: interrupted", err=True)
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


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="throughput-estimator", prog_name="estimator")
@click.pass_context
def commands(context: click.Context) -> None:
    """Predict how fast a PyTorch model trains on any set of devices, from one measurement of the
    machine and one look at the model.

    MODEL is path/to/file.py:function, package.module:function (returning (model, batch) or
    (model, batch, loss)), a saved graph, a summary (job.json), or
    hf:TYPE[:TASK][,key=value...] such as hf:gpt2.
    ALLOCATION is NODESxDEVICES:MACHINE, such as 1x2:local.

    Exit codes: 0 done, 1 the answer is no, 2 wrong input.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


commands.add_command(calibrate)


# probe and profile


def _machine_name(context: click.Context, option: click.Parameter, name: str | None) -> str | None:
    from estimator.machines.profile import check_machine_name

    return None if name is None else check_machine_name(name)


@commands.command()
@click.option("--name", default="local", callback=_machine_name, help="What to call this machine.")
@click.option("--devices", type=Count(), help="Core groups of the CPU, or ranks per node.")
@click.option("--out", type=click.Path(path_type=Path), help="File to write, not the user's store.")
@click.option("--budget", type=Amount(most=1e6), default=60.0, help="Seconds to spend.")
@click.option("--thorough", is_flag=True, help="Measure more sizes; takes several budgets.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
@click.option(
    "--launch",
    type=click.Choice(["slurm", "mpi", "k8s"]),
    help="Print what starts a probe of several nodes instead.",
)
@click.option("--nodes", type=Count(), help="Nodes, each with --devices ranks.")
def probe(
    name: str,
    devices: int | None,
    out: Path | None,
    budget: float,
    thorough: bool,
    as_json: bool,
    launch: Literal["slurm", "mpi", "k8s"] | None,
    nodes: int | None,
) -> None:
    """Measure this machine and keep the profile under its name.

    Interrupted by Ctrl-C it keeps what it has and says what is missing. Several nodes are probed
    together by 'torchrun -m estimator.probe' on each, or by what --launch prints.
    """
    if launch is not None:
        _print_launch(launch, name, nodes, devices, out, budget, as_json)
        return
    if nodes is not None:
        raise click.UsageError("--nodes goes with --launch; alone this command probes one machine")
    from estimator.machines.profile import check_writable, home

    path = out or home() / "machines" / f"{name}.json"
    check_writable(path)
    from estimator.probe.machine import probe_machine

    with progress("probing") as report:
        profile = probe_machine(
            name=name,
            devices=devices,
            budget_s=budget,
            thorough=thorough,
            report=report,
            # 'local-cpu' means this machine's cores, whatever else it has.
            kind="cpu" if name == "local-cpu" else None,
        )
    profile.save(path)
    if profile.missing:
        click.echo(f"not measured: {'; '.join(profile.missing)}", err=True)
    if as_json:
        print_json(profile.to_dict())
    else:
        click.echo(f"{path}: {len(profile.devices)} x {profile.devices[0].name}")


def _print_launch(
    launch: Literal["slurm", "mpi", "k8s"],
    name: str,
    nodes: int | None,
    devices: int | None,
    out: Path | None,
    budget: float,
    as_json: bool,
) -> None:
    if nodes is None:
        raise click.UsageError("--launch needs --nodes, as in --nodes 4")
    from estimator.probe.launchers import launch_text

    options = ["--name", name, "--budget", f"{budget:g}"]
    options += ["--out", str(out)] if out else []
    options += ["--json"] if as_json else []
    # 'local-cpu' means cores, whatever else the nodes have.
    on_gpus = name != "local-cpu"
    if devices is None:
        from estimator.probe.inventory import read_cpu
        from estimator.probe.machine import choose_devices

        own = choose_devices(read_cpu(), kind=None if on_gpus else "cpu")
        devices, on_gpus = len(own), own[0].kind == "cuda"
        kind = "GPUs" if on_gpus else "CPU devices"
        click.echo(f"nodes with {devices} {kind}, as this one; else say --devices", err=True)
    click.echo(launch_text(launch, nodes=nodes, devices=devices, on_gpus=on_gpus, options=options))


@commands.group("profile")
def profiles() -> None:
    """List, show, compare, merge and import machine profiles; print the schema of their files."""


@profiles.command("list")
def list_machines() -> None:
    """Every machine that can be named in an allocation, measured ones first."""
    from estimator.cli.render_profiles import machines_report
    from estimator.machines.profile import home, known_machines, load_profile

    machines: dict[str, tuple[Path, MachineProfile | None]] = {}
    for name, path in known_machines().items():
        try:
            machines[name] = (path, load_profile(path))
        except (ProfileError, UnknownMachineError):  # damaged, or a link that leads nowhere
            machines[name] = (path, None)
    print_tables(machines_report(machines, store=home()))
    if not any(path.is_relative_to(home()) for path, _ in machines.values()):
        click.echo("none of them was measured here; run 'estimator probe' to measure this machine")


@profiles.command()
@click.argument("name")
def show(name: str) -> None:
    """What was measured of the machine NAME (or of a profile file)."""
    from estimator.cli.render_profiles import profile_report
    from estimator.machines.profile import load_profile

    print_tables(profile_report(load_profile(name)))


@profiles.command()
@click.argument("first")
@click.argument("second")
def compare(first: str, second: str) -> None:
    """Every number of the machines FIRST and SECOND, and the ratio of those that both have."""
    from estimator.cli.render_comparison import comparison_report
    from estimator.machines.profile import load_profile

    print_tables(comparison_report(load_profile(first), load_profile(second)))


@profiles.command()
def schema() -> None:
    """Print the JSON Schema of a profile file, to check or write one with other tools.

    Numbers are in the base units that their names end with: seconds, bytes, bytes per second.
    """
    from estimator.machines.profile import json_schema

    print_json(json_schema())


_files_argument = click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="FILE...",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
)


@profiles.command("import")
@_files_argument
@click.option("--into", metavar="NAME", help="Add to this machine's profile.")
@click.option("--name", callback=_machine_name, help="What to call a new machine.")
@click.option("--out", type=click.Path(path_type=Path), help="File to write, not the user's store.")
def import_profile(
    files: tuple[Path, ...], into: str | None, name: str | None, out: Path | None
) -> None:
    """Read what other tools measured: nvbandwidth --json, nccl-tests (text or -J), perftest,
    NCCL_TOPO_DUMP_FILE, nvidia-smi topo -m, Slurm topology.conf and topology.yaml.

    Measured numbers of a profile stay. A Slurm topology becomes a cluster file, printed or written
    to --out, whose nodes are machines called --name.
    """
    from estimator.machines.profile import (
        check_writable,
        home,
        known_machines,
        load_profile,
        write_text_atomically,
    )
    from estimator.placement.topology import cluster_toml
    from estimator.probe.imports.files import read_imports
    from estimator.probe.imports.merging import add_imports, profile_of_imports

    if out is not None:
        check_writable(out)
    found = read_imports(files, machine=name or "local")
    if found.cluster is not None:
        text = cluster_toml(found.cluster)
        if out is None:
            click.echo(text, nl=False)
            return
        write_text_atomically(out, text)
        click.echo(f"{out}: {len(found.cluster.nodes)} nodes of '{name or 'local'}'")
        return
    if (into is None) == (name is None):
        raise click.UsageError("say --into NAME to add to a profile, or --name NAME for a new one")
    if into is not None:
        profile = add_imports(load_profile(into), found)
        default = home() / "machines" / f"{into}.json" if into in known_machines() else Path(into)
    else:
        if out is None and name in known_machines():
            raise click.UsageError(f"'{name}' is known already; use --into {name}, or --out FILE")
        profile = profile_of_imports(found, name=name or "")
        default = home() / "machines" / f"{name}.json"
    profile.save(out or default)
    click.echo(f"{out or default}: {', '.join(dict.fromkeys(found.formats))}")


@profiles.command()
@_files_argument
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File to write.")
def merge(files: tuple[Path, ...], out: Path) -> None:
    """Join profile FILEs of one machine type: later files add what earlier ones lack.

    Of two measurements of the same thing the better source wins, then the newer one.
    """
    from estimator.machines.profile import check_writable, load_profile
    from estimator.probe.imports.merging import merge_profiles

    check_writable(out)
    profile = merge_profiles([load_profile(str(path.absolute())) for path in files])
    profile.save(out)
    click.echo(f"{out}: {len(files)} profiles of {profile.devices[0].name}")


# estimate, validate, check


def _cluster(context: click.Context, option: click.Parameter, path: str | None) -> Cluster | None:
    from estimator.placement.topology import Cluster

    return None if path is None else Cluster.load(path)


def _calibration(
    context: click.Context, option: click.Parameter, path: str | None
) -> Calibrator | None:
    if path is None:
        return None
    from estimator.calibrate.calibrator import Calibrator

    if path != "-" and not Path(path).is_file():
        raise click.BadParameter(f"there is no store '{path}'; see 'estimator calibrate observe'")
    return Calibrator(None if path == "-" else path)


def _workload_options(command: Command) -> Command:
    """Give a command MODEL and the options that make a Request."""
    positive = Count()
    for option in (
        click.option("--measure", is_flag=True, help="Time this model's own operators first."),
        click.option(
            "--cluster",
            callback=_cluster,
            metavar="FILE",
            help="Nodes and the switches between them (TOML).",
        ),
        click.option(
            "--calibration",
            callback=_calibration,
            metavar="STORE",
            help="Correct by the steps observed in this store; - is the user's own.",
        ),
        click.option(
            "--strategy",
            default="ddp",
            help="Such as ddp:bucket=5MiB,view, zero2, fsdp:shard=8 or ps:2.",
        ),
        click.option("--grad-scaler", is_flag=True, help="Scale fp16 gradients, check for inf."),
        click.option("--channels-last", is_flag=True, help="Images with their channels innermost."),
        click.option(
            "--cuda-graphs",
            "execution",
            flag_value="cuda-graphs",
            help='As torch.compile(mode="reduce-overhead") replays it.',
        ),
        click.option(
            "--compile", "execution", flag_value="compiled", help="As torch.compile fuses it."
        ),
        click.option("--precision", type=click.Choice(PRECISIONS), help="Default fp32."),
        click.option("--optimizer", type=click.Choice(OPTIMIZERS), help="Default adamw."),
        click.option("--seq-len", type=positive, help="Tokens per sample, where the model asks."),
        click.option("--accumulation", type=positive, default=1, help="Micro-batches per step."),
        click.option("--global-batch", type=positive, help="Samples of a step, split by speed."),
        click.option("--batch", type=positive, help="Samples per device and micro-batch."),
        click.argument("model"),
    ):
        command = option(command)
    return command


_on_option = click.option("--on", required=True, metavar="ALLOCATION", help="Such as 1x2:local.")


@commands.command()
@_workload_options
@_on_option
@click.option("--samples", type=Amount(), help="Also say how long these take.")
@click.option("--tokens", type=Amount(), help="Also say how long these take.")
@click.option("--json", "as_json", is_flag=True, help="Print base units, unrounded.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a Perfetto timeline here.")
def estimate(
    on: str,
    samples: float | None,
    tokens: float | None,
    as_json: bool,
    trace: Path | None,
    **options: Any,
) -> None:
    """Predict the step time of MODEL on an allocation, and say why.

    Exit code 1: it does not fit into the devices' memory.
    """
    if samples is not None and tokens is not None:
        raise click.UsageError("give --samples or --tokens, not both")
    request = Request(**options)
    if trace is not None:
        from estimator.machines.profile import check_writable

        check_writable(trace)
    graph = _traced(request, (on,))
    balance = request.balance(graph, on)
    answer = balance.answer if balance else request.estimate(graph, on)
    duration_s = None
    if samples is not None or tokens is not None:
        duration_s = answer.duration_s(samples=samples, tokens=tokens)
    if trace is not None:
        _write_trace(answer, trace)
    scaling = request.scaling(graph, answer)
    if as_json:
        more = {
            "duration_s": duration_s,
            "scaling": asdict(scaling) if scaling else None,
            "balance_gain_ratio": balance.gain_ratio if balance else None,
        }
        print_json(answer.to_dict() | more)
    else:
        from estimator.cli.render import estimate_report

        report = estimate_report(answer, duration_s=duration_s, scaling=scaling, balance=balance)
        print_tables(report)
    if answer.fits == "no":
        raise click.exceptions.Exit(ANSWER_IS_NO)


@commands.command()
@_workload_options
@click.option(
    "--on",
    "patterns",
    required=True,
    multiple=True,
    metavar="PATTERN",
    help="Such as 1..8x1..8:local; repeat.",
)
@click.option("--json", "as_json", is_flag=True, help="Print base units, unrounded.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated base units.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw it, as .png or .svg.")
@click.option("--strategies", help="Compare these instead, as in 'ddp zero1 ps:2,async'.")
def sweep(
    patterns: tuple[str, ...],
    as_json: bool,
    as_csv: bool,
    picture: Path | None,
    strategies: str | None,
    **options: Any,
) -> None:
    """Predict MODEL on every allocation of a PATTERN and print how it scales.

    Ranges such as 1..8 stand where an allocation has a number of nodes or devices. "Of linear" is
    throughput per rank over that of the smallest allocation, with the same share of the update.
    With --strategies every allocation lists them by step time, the fastest first.
    """
    from estimator.advise.sweeps import existing, sweep_csv
    from estimator.advise.sweeps import sweep as run_all

    if as_json and as_csv:
        raise click.UsageError("give --json or --csv, not both")
    request = Request(**options)
    if strategies is not None:
        if picture is not None:
            raise click.UsageError("--picture draws one strategy; leave out --strategies")
        _compare_strategies(request, patterns, strategies.split(), as_json, as_csv)
        return
    if picture is not None:
        from estimator.machines.profile import check_writable

        check_writable(picture)
    graph = _traced(request, existing(patterns, request.exists)[:1])
    rows = run_all(patterns, lambda text: request.estimate(graph, text))
    if picture is not None:
        from estimator.report.scaling import draw_scaling

        draw_scaling(rows, picture)
    if as_json:
        print_json([row.to_dict() for row in rows])
    elif as_csv:
        click.echo(sweep_csv(rows), nl=False)
    else:
        from estimator.cli.render import sweep_report

        print_tables(sweep_report(rows))


def _compare_strategies(
    request: Request,
    patterns: Sequence[str],
    strategies: Sequence[str],
    as_json: bool,
    as_csv: bool,
) -> None:
    from estimator.advise.sweeps import existing, sweep_csv
    from estimator.workload import Strategy

    wanted = [Strategy.parse(text) for text in strategies]
    allocations = existing(patterns, request.exists)
    graph = _traced(request, allocations[:1])
    rows = [row for text in allocations for row in request.ranked(graph, text, wanted)]
    if as_json:
        print_json([row.to_dict() for row in rows])
    elif as_csv:
        click.echo(sweep_csv(rows), nl=False)
    else:
        from estimator.cli.render import strategies_report

        print_tables(strategies_report(rows))


@commands.command()
@_workload_options
@click.option(
    "--on", required=True, multiple=True, metavar="ALLOCATION", help="Such as 1x2:local; repeat."
)
@click.option("--repeats", type=Count(3), default=5, help="Fresh runs of each.")
@click.option("--steps", type=Count(), default=15, help="Steps timed in a run.")
@click.option("--warmup", type=Count(2), default=3, help="Steps before those.")
@click.option("--json", "as_json", is_flag=True, help="Print base units, unrounded.")
def validate(
    on: tuple[str, ...], repeats: int, steps: int, warmup: int, as_json: bool, **options: Any
) -> None:
    """Train MODEL for real on this machine and print predicted beside measured.

    Predictions are made first. Exit code 1: some measurement lies outside its prediction's
    interval and more than 25 % away.
    """
    from estimator.graph.files import is_saved_graph, is_summary_file
    from estimator.report.validation import validate as run_all

    request = Request(**options)
    if is_saved_graph(request.model) or is_summary_file(request.model):
        what = "summary" if is_summary_file(request.model) else "saved graph"
        raise ModelError(
            f"{request.model} is a {what}, which cannot be trained; name the model itself"
        )
    request.check_trainable_here(on)
    graph = _traced(request, on)
    predictions = [request.estimate(graph, text) for text in on]
    train = request.trainer(graph, steps=steps, warmup_steps=warmup)
    with progress("training") as tell:
        total = repeats * len(predictions)

        def report(run: int, predicted: Estimate, step_s: float) -> None:
            tell(f"{predicted.allocation}", run / total)

        cases = run_all(predictions, train, repeats=repeats, report=report)
    if as_json:
        print_json([case.to_dict() for case in cases])
    else:
        from estimator.cli.render import validation_report

        print_tables(validation_report(cases))
    if not all(
        case.is_within_interval or abs(case.error_ratio) <= TOLERATED_ERROR_RATIO for case in cases
    ):
        raise click.exceptions.Exit(ANSWER_IS_NO)


@commands.command()
@_workload_options
@_on_option
def check(on: str, **options: Any) -> None:
    """Say what an estimate of MODEL lacks: what is missing or only assumed, with its share.

    Exit code 1: more than 10 % of the time rests on datasheets and assumptions, or the model does
    not fit.
    """
    from estimator.cli.render import check_report

    request = Request(**options)
    graph = _traced(request, (on,))
    answer = request.estimate(graph, on)
    unmeasured_ratio = sum(
        share_ratio
        for _, source, share_ratio, _ in answer.provenance
        if source in ("assumed", "datasheet")
    )
    print_tables(check_report(answer, unmeasured_ratio=unmeasured_ratio))
    if unmeasured_ratio > TOLERATED_UNMEASURED_RATIO or answer.fits == "no":
        raise click.exceptions.Exit(ANSWER_IS_NO)


def _traced(request: Request, allocations: Sequence[str]) -> OpGraph:
    if not request.measure:
        with waiting(f"looking at {request.model}"), printing_to_stderr():
            return request.graph(allocations)
    with progress("timing operators") as report, printing_to_stderr():
        return request.graph(allocations, report)


def _write_trace(answer: Estimate, path: Path) -> None:
    from estimator.interop.perfetto import write_trace

    write_trace(answer.timeline, path)


if __name__ == "__main__":
    main()
