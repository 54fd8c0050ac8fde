"""Tensor parallel ranks on a CPU beside one process with a thread for every core: output tokens a second of
the first over the second's. Both have all cores, in turn.

    python benchmarks/tensor_parallel.py WORKLOADS.json MODEL [--ranks 2] [--rounds 3] [--only SCENARIO ...]

The arguments are those of ``workloads.py``.
"""

from __future__ import annotations

import statistics

from workloads import command_line, own_engines, read_work

CACHE_GIB = 1.0


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    scenarios = read_work(options.workloads, options.only)
    with own_engines(options.model, [f"octavo*{options.ranks}", "octavo"], CACHE_GIB) as engines:
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
