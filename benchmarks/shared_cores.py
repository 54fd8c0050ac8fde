"""Two engines on the same cores, each with a thread for every one of them: what both make together over what
one makes alone. Threads that wait for each other at barriers can lose far more than half when they share.

    python benchmarks/shared_cores.py WORKLOADS.json MODEL [--rounds 3] [--only SCENARIO ...]

The arguments are those of ``workloads.py``. The two take the same work at the same time; one alone has the
cores to itself while the other is stopped.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor

from workloads import command_line, own_engines, read_work

CACHE_GIB = 1.0


def main() -> None:
    options = command_line(__doc__).parse_args()
    scenarios = read_work(options.workloads, options.only)
    with own_engines(options.model, ["octavo"] * 2, CACHE_GIB) as engines, ThreadPoolExecutor(2) as pool:
        for name, work in scenarios.items():
            shares = []
            for _ in range(options.rounds + 1):
                alone = [engine.run(work) for engine in engines]
                together = list(pool.map(lambda engine, work=work: engine.run(work), engines))
                shares.append(sum(together) / statistics.mean(alone))
            print(f"{name}: together {statistics.median(shares[1:]):.0%} of one alone", flush=True)


if __name__ == "__main__":
    main()
