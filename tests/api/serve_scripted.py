"""``octavo serve`` as its own process, with a scripted executor: EXECUTOR MODEL [flags]."""

from __future__ import annotations

import sys

import uvloop
from scripted_engine import ScriptedEngine

from octavo.api.cli import parse_args
from octavo.api.server import Server, serve, set_up_logging
from octavo.errors import OctavoError

if __name__ == "__main__":
    config = parse_args(sys.argv[2:])
    set_up_logging(config.log_level)
    try:
        sys.exit(uvloop.run(serve(Server(config, ScriptedEngine(sys.argv[1])))))
    except OctavoError as error:
        print(f"octavo: {error.message}", file=sys.stderr)
        sys.exit(1)
