"""Two engines on the same cores, each with a thread for every one of them: what both make together over what
one makes alone. Threads that wait for each other at barriers can lose far more than half when they share.

    python benchmarks/shared_cores.py WORKLOADS.json MODEL [--rounds 3] [--only SCENARIO ...]

The arguments are those of ``workloads.py``. The two take the same work at the same time; one alone has the
cores to itself while the other is stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workloads import Engine, read_work

CACHE_GIB = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", type=Path)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    scenarios = read_work(options.workloads, options.only)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        engines = []
        for number in range(2):
            log = Path(folder) / f"{number}.log"
            engines.append(Engine("octavo", sys.executable, options.model, CACHE_GIB, log))
            stack.callback(engines[-1].close)
            engines[-1].load()
        with ThreadPoolExecutor(len(engines)) as pool:
            for name, work in scenarios.items():
                shares = []
                for _ in range(options.rounds + 1):
                    alone = [engine.run(work) for engine in engines]
                    together = list(pool.map(lambda engine, work=work: engine.run(work), engines))
                    shares.append(sum(together) / statistics.mean(alone))
                print(f"{name}: together {statistics.median(shares[1:]):.0%} of one alone", flush=True)


if __name__ == "__main__":
    main()
