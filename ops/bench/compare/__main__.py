"""The command ``python -m baton.ops.bench.compare``: runs the rounds, writes JSON, tables and a plot."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from click.core import ParameterSource

from baton.ops.bench.command import id_range
from baton.ops.bench.compare import plot as plotting
from baton.ops.bench.compare.markdown import markdown
from baton.ops.bench.compare.measured import Comparison
from baton.ops.bench.compare.requests import KINDS, BadRequests, Part, Shape, make, read, write
from baton.ops.bench.compare.rounds import compare, machine
from baton.ops.bench.compare.servers import EXAMPLE, BadTable, Server, chosen, read_table
from baton.ops.bench.report import Objectives
from baton.ops.bench.server import ServerFailed

#: the flags that shape the requests, by parameter
SHAPING = ("seed", "repeats", "arrivals", "trace", "context_tokens", "vocabulary", "workloads", "loads", "rates")
#: the parameters that say what is made of what was measured
SHOWING = {"earlier", "baseline", "markdown_path", "plot_path"}


def setting(text: str, placeholder: str = "") -> tuple[str, str, str]:
    """``NAME=VALUE`` for a placeholder, or ``NAME.PLACEHOLDER=VALUE`` for any, in three parts."""
    left, equals, value = text.partition("=")
    name, key = (left, placeholder) if placeholder else left.rpartition(".")[::2]
    if not (equals and name and key and value):
        raise click.ClickException(f"{text!r} is not {'NAME=VALUE' if placeholder else 'NAME.PLACEHOLDER=VALUE'}")
    return name, key, value


def parts_of(path: Path | None, shape: Shape, explicit: Sequence[str], scratch: Path) -> tuple[Path, list[Part]]:
    """The file of requests and what it holds; made where it is not there, from the shape."""
    if path is not None and path.exists():
        if explicit:
            raise BadRequests(f"{path} is there and says what is sent; {', '.join(explicit)} would have no effect")
        return path, read(path)
    path = path if path is not None else scratch / "requests.jsonl"
    write(path, make(shape))
    return path, read(path)


def ready_servers(
    table: Path, names: Sequence[str], peers: Sequence[str], models: Sequence[str], values: Sequence[str]
) -> list[Server]:
    """The servers that the flags ask for."""
    settings = [setting(text, "venv") for text in peers] + [setting(text, "model") for text in models]
    found = chosen(read_table(table), names, [*settings, *map(setting, values)])
    if not found:
        raise BadTable(f"{table}: no server has all it needs; fill placeholders with --peer, --model and --set")
    return found


@click.command()
@click.option("--servers", "table", type=click.Path(path_type=Path), default=EXAMPLE, help="Table of servers (TOML).")
@click.option("--server", "names", metavar="NAME", multiple=True, help="Measure this one; all that are filled if none.")
@click.option("--peer", "peers", metavar="NAME=DIRECTORY", multiple=True, help="Where a peer is installed: {venv}.")
@click.option("--model", "models", metavar="NAME=PATH", multiple=True, help="A server's model: {model}.")
@click.option("--set", "values", metavar="NAME.PLACEHOLDER=VALUE", multiple=True, help="Fill any placeholder.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="How often, in turn.")
@click.option("--requests", "path", type=click.Path(path_type=Path), help="File of requests, made if it is not there.")
@click.option("--workload", "workloads", type=click.Choice(KINDS), multiple=True, help="Only these.")
@click.option("--load", "loads", type=click.FloatRange(0.01), multiple=True, help="Shares of a server's own capacity.")
@click.option("--rate", "rates", type=click.FloatRange(0.001), multiple=True, help="Requests/s, the same at each.")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Where lengths come from.")
@click.option("--arrivals", type=click.IntRange(1), default=64, show_default=True, help="Requests a load or rate.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Requests, one after another.")
@click.option(
    "--context-tokens", type=click.IntRange(2), default=2048, show_default=True, help="Cap of prompt + answer."
)
@click.option("--vocabulary", default="1000-19999", show_default=True, help="Ids that prompts are made of.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which requests are made.")
@click.option("--timeout", type=click.FloatRange(0.1), default=300.0, show_default=True, help="A request's time, s.")
@click.option("--ttft-slo-ms", type=click.FloatRange(0), default=2000.0, show_default=True, help="Bound for goodput.")
@click.option("--itl-slo-ms", type=click.FloatRange(0), default=200.0, show_default=True, help="Bound for goodput.")
@click.option("--baseline", metavar="NAME", help="What the others are compared with; the first measured otherwise.")
@click.option(
    "--logs", type=click.Path(path_type=Path), help="Directory for what servers say; a temporary one otherwise."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything, as it grows.")
@click.option("--markdown", "markdown_path", type=click.Path(path_type=Path), help="Write the tables there too.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Draw latency against load (png, svg, pdf).")
@click.option(
    "--from", "earlier", type=click.Path(exists=True, path_type=Path), help="Measure nothing: show that JSON."
)
@click.pass_context
def main(
    context: click.Context,
    table: Path,
    names: tuple[str, ...],
    peers: tuple[str, ...],
    models: tuple[str, ...],
    values: tuple[str, ...],
    rounds: int,
    path: Path | None,
    workloads: tuple[str, ...],
    loads: tuple[float, ...],
    rates: tuple[float, ...],
    trace: Path | None,
    arrivals: int,
    repeats: int,
    context_tokens: int,
    vocabulary: str,
    seed: int,
    timeout: float,
    ttft_slo_ms: float,
    itl_slo_ms: float,
    baseline: str | None,
    logs: Path | None,
    json_path: Path | None,
    markdown_path: Path | None,
    plot_path: Path | None,
    earlier: Path | None,
) -> None:
    """Measure Baton and other servers side by side, in turn and repeated.

    Each is started alone, warmed up and sent the same requests. By default: a single stream, 32 at once, one long
    prompt, a shared prefix; with --trace also random arrivals at 50, 80 and 110 % of each server's own capacity, and
    with --rate at the same rates for all.
    """
    shape = Shape(
        workloads=workloads or [kind for kind in KINDS if (kind != "load" or trace) and (kind != "rate" or rates)],
        loads=loads or (0.5, 0.8, 1.1),
        rates=rates,
        repeats=repeats,
        arrivals=arrivals,
        trace=trace,
        context_tokens=context_tokens,
        vocabulary=range(0),
        seed=seed,
    )
    explicit = [
        "--" + {"workloads": "workload", "loads": "load", "rates": "rate"}.get(name, name).replace("_", "-")
        for name in SHAPING
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    logs = logs if logs is not None else Path(tempfile.mkdtemp(prefix="baton-compare-"))
    try:
        if plot_path is not None:
            plotting.check()
        if earlier is not None:
            given = {
                name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
            }
            if unused := given - SHOWING:
                raise BadTable(f"--from measures nothing; {', '.join(sorted(unused))} would have no effect")
            found = msgspec.json.decode(earlier.read_bytes(), type=Comparison)
        else:
            servers = ready_servers(table, names, peers, models, values)
            check_baseline(baseline, [server.name for server in servers])
            shape = msgspec.structs.replace(shape, vocabulary=id_range(vocabulary))
            requests, parts = parts_of(path, shape, explicit, logs)
            found = Comparison(
                machine=machine(),
                requests=str(requests),
                timeout_s=timeout,
                objectives=Objectives(ttft_ms=ttft_slo_ms, itl_ms=itl_slo_ms),
                rounds=rounds,
            )
            measured(found, servers, parts, logs, json_path)
        show(found, baseline, markdown_path, plot_path)
    except (BadTable, BadRequests, ServerFailed, plotting.NoPlot, ValueError) as error:
        raise click.ClickException(str(error)) from None


def check_baseline(baseline: str | None, names: Sequence[str]) -> None:
    """``BadTable`` where what the others are to be compared with is not among them."""
    if baseline is not None and baseline not in names:
        raise BadTable(f"--baseline {baseline}: only these are measured: {', '.join(names)}")


def measured(
    found: Comparison, servers: Sequence[Server], parts: Sequence[Part], logs: Path, path: Path | None
) -> None:
    """Run the rounds; what is there so far is in the JSON file at any time."""

    def keep() -> None:
        if path is not None:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")

    # To be terminated is to be interrupted: the server that runs is ended too.
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        compare(found, servers, parts, logs, keep, lambda said: click.echo(said, err=True))
    finally:
        signal.signal(signal.SIGTERM, before)


def show(found: Comparison, baseline: str | None, markdown_path: Path | None, plot_path: Path | None) -> None:
    """The tables on stdout, and where else they were asked for."""
    measured_names = found.names()
    if not measured_names:
        raise BadTable("nothing was measured")
    check_baseline(baseline, measured_names)
    page = markdown(found, baseline or measured_names[0])
    click.echo(page, nl=False)
    if markdown_path is not None:
        markdown_path.write_text(page, encoding="utf-8")
    if plot_path is not None:
        plotting.plot(found, plot_path)


if __name__ == "__main__":
    main()
