"""Tensor parallel ranks on a CPU beside one process with a thread for every core: output tokens a second of
the first over the second's. Both have all cores, in turn.

    python benchmarks/tensor_parallel.py WORKLOADS.json MODEL [--ranks 2] [--rounds 3] [--only SCENARIO ...]

The arguments are those of ``workloads.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path

from workloads import Engine, read_work

CACHE_GIB = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", type=Path)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    scenarios = read_work(options.workloads, options.only)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        engines = []
        for kind in (f"octavo*{options.ranks}", "octavo"):
            engine = Engine(kind, sys.executable, options.model, CACHE_GIB, Path(folder) / f"{kind}.log")
            stack.callback(engine.close)
            engine.load()
            engines.append(engine)
        for name, work in scenarios.items():
            rates = [[engine.run(work) for engine in engines] for _ in range(options.rounds + 1)][1:]
            ratio = statistics.median(ranks / alone for ranks, alone in rates)
            shown = " and ".join(f"{statistics.median(each):.1f}" for each in zip(*rates, strict=True))
            print(
                f"{name}: {options.ranks} ranks and one process make {shown} tokens/s: {ratio:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
