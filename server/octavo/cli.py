"""The `octavo` command: one table of subcommands, each imported only when it is called."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence

from octavo.errors import ConfigError, OctavoError
from octavo.importing import imported

COMMANDS = {  # what runs it, what it does, the extra that brings the packages that it needs
    "serve": ("octavo.api.cli:main", "serve a model over the OpenAI API", "server"),
    "up": ("octavo_operator.local.cli:main", "run an InferenceService manifest on this machine", "operator"),
    "router": ("octavo_router.cli:main", "route requests to engines by prefix and load", "router"),
    "operator": ("octavo_operator.cli:main", "reconcile InferenceServices in a cluster", "operator"),
    "chat": ("octavo.client.chat:main", "talk with a model in the terminal", "client"),
    "complete": ("octavo.client.complete:main", "continue a text", "client"),
    "run-batch": ("octavo.client.batch:main", "answer a file of requests in OpenAI's batch format", "client"),
    "bench": ("octavo.client.bench.cli:main", "load on an endpoint, and what its users would see", "client"),
    "simulate": ("octavo.simulate.cli:main", "what the engine would do, on simulated time", "simulate"),
    "fetch": ("octavo.fetch:main", "bring a model to a folder", "server"),
}
OURS = ("octavo", "octavo_kernels", "octavo_router", "octavo_operator")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. A user's mistake ends with one line on stderr and 2, a known failure with 1; where
    nobody reads stdout any more, as behind `| head`, it ends with what a shell says of SIGPIPE.
    """
    try:
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        if not _stdout_is_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 128 + signal.SIGPIPE


def _stdout_is_left() -> bool:
    poll = select.poll()
    poll.register(sys.stdout, 0)  # asks for nothing: of an end that is gone it tells unasked
    return bool(poll.poll(0))


def _main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        lines = [f"  {name:<10} {text}" for name, (_, text, _) in COMMANDS.items()]
        print("usage: octavo COMMAND ...\n", *lines, sep="\n")
        return 0 if args else 2
    if args[0] == "--version":
        from octavo import __version__

        print(__version__)
        return 0
    try:
        if args[0] not in COMMANDS:
            raise ConfigError(f"unknown command {args[0]!r}: choose one of {', '.join(COMMANDS)}")
        place, _, extra = COMMANDS[args[0]]
        return _run(place, extra, args)
    except OctavoError as error:
        print(f"octavo: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _run(place: str, extra: str, args: list[str]) -> int:
    try:
        return int(imported(place)(args[1:]))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in OURS:
            raise  # a fault of ours, not a package that is missing
        raise ConfigError(
            f"{args[0]} needs {package}, which is not installed here: pip install 'octavo[{extra}]'"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
