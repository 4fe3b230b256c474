"""The command line. It parses, and hands over: each command imports what it needs when it runs, so ``--help`` is quick.

Whatever goes wrong before or at start-up is one line on stderr and a non-zero status, never a traceback (``serve``
with ``--log-level debug`` excepted).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from baton import __version__

Command = TypeVar("Command", bound=Callable[..., Any])  # click's decorators take functions of any signature

#: flag -> help; the flag's text is read as its setting's type by ``ops.configure``, like any other source's
SERVE_FLAGS = {
    "--model": "Alias or GGUF file of the model to serve.",
    "--served-model-name": "Name clients use for it.",
    "--host": "Address to listen on.",
    "--port": "Port to listen on; 0 picks a free one and prints it.",
    "--frontends": "Processes that share the port and answer clients, 1 to 8.",
    "--tokenizers": "Processes that render and encode prompts, 1 to 8.",
    "--zmq": "ZeroMQ endpoint to offer besides, e.g. tcp://127.0.0.1:8001.",
    "--device": "Where the model computes: cpu or cuda.",
    "--dtype": "Type the model computes in: bfloat16 or float32.",
    "--weights": "How weights are held: bfloat16, float32, int8, or native (a GGUF's 4 and 8 bits as they come).",
    "--kernels": "Who computes: native (C++, built at the first start), torch, or auto: native where it can.",
    "--kv-memory": "Memory for the KV cache, e.g. 4GiB.",
    "--kv-blocks": "Blocks of the KV cache, instead of --kv-memory.",
    "--swap-memory": "Host memory for requests that gave way, e.g. 4GiB; 0 is none.",
    "--max-step-tokens": "Most tokens one step computes.",
    "--admission": "What a request is promised of the KV cache: reserve, optimistic or predicted.",
    "--order": "Who is served first: arrival, priority, shortest, prefix or deadline.",
    "--itl-target-ms": "Longest step, in ms, that a prompt may cause while others decode; 0 is none.",
    "--threads": "Threads the worker computes with.",
    "--niceness": "How much frontends, tokenizers and detokenizer give way to the worker, 0 to 19.",
    "--worker": "model, or scripted: no model, made-up tokens.",
    "--run-directory": "Where run directories are made.",
    "--log-level": "debug, info, warning or error.",
}


def serve_flags(command: Command) -> Command:
    """Give a command every flag of ``serve``."""
    for flag, words in reversed(SERVE_FLAGS.items()):
        command = click.option(flag, metavar="VALUE", help=words)(command)
    return click.option("--config", "file", metavar="FILE", help="TOML file of settings (or BATON_CONFIG).")(command)


def fail(error: BaseException | str, status: int = 1) -> NoReturn:
    """Say in one line what was wrong, and end."""
    words = str(error) or type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        words += "; to serve, install baton-llm[serve]"
    click.echo("baton: " + " ".join(words.split()), err=True)
    sys.exit(status)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="baton")
def cli() -> None:
    """Baton serves large language models: every request has exactly one owner."""


@cli.command()
@serve_flags
def serve(file: str | None, **flags: str | None) -> None:
    """Serve a model over HTTP, WebSocket and ZeroMQ.

    Settings come from defaults, a TOML file, BATON_* variables and flags; later ones win. See `baton config`.
    """
    from baton.ops.configure import ConfigurationError, configure

    try:
        settings = configure(given(flags), file=file).settings
    except ConfigurationError as error:
        fail(error, 2)
    try:
        from baton.ops.fetch import ensure
        from baton.workers.supervisor import main

        ensure(settings.model)  # the scripted worker needs it as well, for its vocabulary
        status = main(settings)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if settings.log_level == "debug":
            raise
        fail(error)
    sys.exit(status)


@cli.command()
@serve_flags
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def config(file: str | None, as_json: bool, **flags: str | None) -> None:
    """Show every setting in force and where its value came from."""
    from baton.ops.configure import ConfigurationError, configure
    from baton.ops.show import configuration

    try:
        configuration(configure(given(flags), file=file), as_json)
    except ConfigurationError as error:
        fail(error, 2)


@cli.command()
@click.argument("alias")
def pull(alias: str) -> None:
    """Download a model by its alias, unless it is here already; prints where it is."""
    from baton.ops.fetch import fetch

    try:
        click.echo(fetch(alias))
    except Exception as error:
        fail(error)


@cli.command()
@click.option("--url", help="Base URL of an OpenAI-compatible server, to speak HTTP with.")
@click.option("--zmq", help="ZeroMQ address of a Baton server; the newest one on this machine by default.")
@click.option("--model", help="Model to ask for; the server's only one by default.")
@click.option("--system", help="System message to begin with.")
@click.option("--max-tokens", type=click.IntRange(1), help="Most tokens an answer may have.")
@click.option("--temperature", type=click.FloatRange(0), help="Sampling temperature.")
def chat(**options: Any) -> None:  # click passes each option under its name
    """Chat with a model. Ctrl-C cancels an answer, Ctrl-D ends. Piped: one prompt in, its answer out."""
    from baton.frontends.client import BatonError
    from baton.ops.chat import AnswerFailed, Asked, run

    try:
        sys.exit(run(Asked(**options)))
    except (AnswerFailed, BatonError, ValueError, OSError) as error:
        fail(error)


@cli.command()
@click.argument("which", default="last", metavar="last|ID")
@click.option("--run-directory", metavar="DIR", help="The server's run directory; the newest live one by default.")
@click.option("--steps", is_flag=True, help="List the steps the request took part in.")
@click.option("--json", "as_json", is_flag=True, help="Print OTLP JSON.")
def trace(which: str, run_directory: str | None, steps: bool, as_json: bool) -> None:
    """Show one request's life as a waterfall. ID is a request id, with or without prefix, or a trace id."""
    from baton.ops.trace.command import run

    try:
        run(which, run_directory, steps, as_json)
    except (LookupError, OSError) as error:
        fail(error.args[0] if isinstance(error, LookupError) else error)


@cli.command()
@click.option("--run-directory", metavar="DIR", help="The server's run directory; the newest live one by default.")
@click.option("--interval", type=click.FloatRange(0.05), default=0.5, show_default=True, help="Seconds between frames.")
@click.option("--once", is_flag=True, help="Print one frame and end.")
def top(run_directory: str | None, interval: float, once: bool) -> None:
    """Watch who holds which request, live."""
    from baton.ops.top import run

    try:
        run(run_directory, interval, once)
    except (LookupError, OSError) as error:
        fail(error.args[0] if isinstance(error, LookupError) else error)


@cli.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="OpenAI-compatible server.")
@click.option("--model", help="Model to ask for; the server's first one by default.")
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True, help="Requests open at a time.")
@click.option("--requests", type=click.IntRange(1), help="Requests in all.")
@click.option("--seconds", type=click.FloatRange(0.1), help="Start no request after this long.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens a prompt.")
@click.option("--output-tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens an answer.")
@click.option("--vocabulary", default="100-30000", show_default=True, metavar="FROM-TO", help="Range of prompt ids.")
@click.option("--text", metavar="TEXT", help="Send this text as the prompt, instead of random ids.")
@click.option("--timeout", type=click.FloatRange(0.01), default=120.0, show_default=True, help="Seconds a request.")
@click.option("--ignore-eos", is_flag=True, help="Ask for answers of exactly --output-tokens.")
@click.option("--ttft-slo-ms", type=click.FloatRange(0), help="Goodput: bound on time to first token.")
@click.option("--itl-slo-ms", type=click.FloatRange(0), help="Goodput: bound on each gap between deltas (p99).")
@click.option("--tpot-slo-ms", "--tpot", type=click.FloatRange(0), help="Goodput: bound on mean time per output token.")
@click.option("--e2e-slo-ms", type=click.FloatRange(0), help="Goodput: bound on the whole request.")
@click.option("--api-key", metavar="KEY", help="Sent as a bearer token.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the prompts.")
@click.option("--json", "json_path", metavar="PATH", help="Write the report as JSON ('-': to stdout, no table).")
def bench(**options: Any) -> None:  # click passes each option under its name
    """Measure an OpenAI-compatible server at a fixed number of concurrent requests."""
    from baton.ops.bench.command import Asked, run

    try:
        sys.exit(run(Asked(**options)))
    except (ValueError, OSError) as error:
        fail(error)


def given(flags: dict[str, str | None]) -> dict[str, str]:
    """The flags that were given."""
    return {name: text for name, text in flags.items() if text is not None}
