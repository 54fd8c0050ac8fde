"""The command line of ``octavo serve``."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.config import CommandParser, EngineConfig, add_engine_flags
from octavo.engine.launch import start_engine
from octavo.importing import imported


def parse_args(argv: Sequence[str]) -> EngineConfig:
    """Settings from ``MODEL [flags]``. Raises ``ConfigError``; ``--help`` prints and exits."""
    parser = CommandParser(prog="octavo serve", description="Serve a model over the OpenAI API.")
    parser.add_argument("model", metavar="MODEL", help="a path, or a file://, package:// or hf:// address")
    add_engine_flags(parser)
    return EngineConfig(**vars(parser.parse_args(list(argv))))


def main(argv: Sequence[str]) -> int:
    """``octavo serve MODEL [flags]``. Returns 0 after a drain; errors are raised as ``OctavoError``."""
    config = parse_args(argv)
    engine = start_engine()  # which imports torch while we import what an API needs
    return int(imported("octavo.api.server:run")(config, engine))
