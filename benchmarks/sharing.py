"""KV blocks that parallel samples and beams save by sharing, on the real engine, beside the paper's figures.

    python benchmarks/sharing.py WORKLOADS.json MODEL [--requests 8] [--max-num-seqs 32]

Prompts are cut from those of the workloads; lengths are drawn as short instructions (Alpaca) and as
conversations (ShareGPT) have them (``octavo.simulate.lengths``). For each kind, n = 2, 4, 6 random samples
and 2, 4, 6 beams. Saved is 1 - distinct blocks / entries of all block tables, over all steps: what the
PagedAttention paper (SOSP 2023, figure 15) plots. Memory does not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from octavo.config import engine_config
from octavo.core.outputs import EngineRequest
from octavo.core.plan import NO_BLOCK, StepPlan, StepResult
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.executor import Executor
from octavo.fetch import fetch
from octavo.simulate.lengths import ALPACA, SHAREGPT, Lengths
from octavo.worker.executor import build_executor

WIDTHS = (2, 4, 6)
# The paper's shares with 2 and with 6: (parallel samples, beams). OPT-13B.
PAPER = {"alpaca": ((0.061, 0.098), (0.376, 0.552)), "sharegpt": ((0.162, 0.305), (0.443, 0.663))}


class Counting:
    """Hands plans on, and counts the blocks that their rows name."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.info = executor.info
        self.entries = self.distinct = 0

    def check(self) -> None:
        self._executor.check()

    def execute(self, plan: StepPlan) -> StepResult:
        tables = [block for row in plan.rows for table in row.block_tables for block in table]
        held = [block for block in tables if block != NO_BLOCK]
        self.entries += len(held)
        self.distinct += len(set(held))
        return self._executor.execute(plan)

    def saved(self) -> float:
        share = 1 - self.distinct / self.entries
        self.entries = self.distinct = 0
        return share


def requests(
    texts: list[list[int]], lengths: Lengths, count: int, width: int, beams: bool
) -> Iterator[list[EngineRequest]]:
    rng = random.Random(width)
    for number in range(count):
        prompt_tokens, output_tokens = lengths.draw(rng)
        text = rng.choice(texts)
        sampling = SamplingParams(
            temperature=0 if beams else 1,
            seed=number,
            max_tokens=output_tokens,
            ignore_eos=not beams,
            use_beam_search=beams,
        )
        yield [
            EngineRequest(
                request_id=f"{number}-{sample}",
                group=str(number),
                prompt_token_ids=[number % 100, *text][:prompt_tokens],  # no two prompts share a block
                sampling=sampling,
                sample_index=sample,
            )
            for sample in range(width)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", type=Path)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    args = parser.parse_args()
    scenarios = json.loads(args.workloads.read_text())["scenarios"]
    texts = [one["prompt_ids"] for one in scenarios["C_mixed"] if len(one["prompt_ids"]) > 400]
    config = engine_config(
        args.model,
        {
            "device": "cpu",
            "max_model_len": 1024,
            "max_num_seqs": args.max_num_seqs,
            "kv_cache_memory_bytes": "1Gi",
        },
    )
    path = fetch(config.model, None, lambda detail: None)
    executor = Counting(build_executor(config, path, lambda stage, detail: None))
    engine = EngineCore(config, executor)
    print(f"{'':<18}" + "".join(f"{width:>8}" for width in WIDTHS) + "   paper, 2 to 6")
    for name, lengths in (("alpaca", ALPACA), ("sharegpt", SHAREGPT)):
        short = Lengths(lengths.prompt_mean, lengths.output_mean, lengths.sigma, max_total=1000)
        for beams, kind in ((False, "samples"), (True, "beams")):
            line = f"{name:<10}{kind:<8}"
            for width in WIDTHS:
                for each in requests(texts, short, args.requests, width, beams):
                    engine.add(each)
                while engine.has_work:
                    engine.step()
                line += f"{executor.saved():>8.1%}"
            least, most = PAPER[name][beams]
            print(f"{line}   {least:.1%} to {most:.1%}", flush=True)


if __name__ == "__main__":
    main()
