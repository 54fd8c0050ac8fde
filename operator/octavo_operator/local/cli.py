"""`octavo up -f FILE`: serve what an InferenceService manifest asks for, on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from octavo.config import CommandParser
from octavo.errors import ConfigError
from octavo_operator.local.machine import state_folder
from octavo_operator.local.manifest import Manifest
from octavo_operator.local.runner import Runner

DEFAULT_PORT = 8000


def main(argv: Sequence[str]) -> int:
    """Run until Ctrl-C, or with ``--once`` until the first answer. Raises ``OctavoError``."""
    parser = CommandParser(prog="octavo up", description=__doc__)
    parser.add_argument(
        "-f", "--file", type=Path, required=True, help="manifest; its edits are applied as it runs"
    )
    parser.add_argument("--once", action="store_true", help="leave after the first answer")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port of the router (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key-dir", type=Path, metavar="DIR", help="folder of key files: the Secret that spec.auth names"
    )
    args = parser.parse_args(list(argv))
    if not 1 <= args.port <= 65535:
        raise ConfigError(f"port is {args.port}: it must be between 1 and 65535")
    keys = args.api_key_dir.absolute() if args.api_key_dir else None
    runner = Runner(Manifest(args.file, keys), args.port, args.once, keys, state_folder(args.port))
    return asyncio.run(runner.run())
