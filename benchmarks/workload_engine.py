"""One engine behind a pipe, for ``workloads.py``: runs in whichever interpreter has that engine.

    PYTHON benchmarks/workload_engine.py octavo|octavo*RANKS|vllm|llama.cpp MODEL MAX_MODEL_LEN MAX_NUM_SEQS
        CACHE_GIB DTYPE

DTYPE: as ``octavo serve --dtype`` takes it; llama.cpp computes with what its file holds. Answers each JSON
line of standard input, a list of ``[prompt ids, output tokens]``, with a JSON line ``{"seconds": s,
"tokens": n}``; the first line, ``{"ready": version}``, says that the model is loaded. The prefix cache is
emptied before each run. What libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Work = list[tuple[list[int], int]]
Run = Callable[[Work], int]


def octavo_engine(
    model: str, max_model_len: int, max_num_seqs: int, cache_gib: float, dtype: str, ranks: int = 1
) -> tuple[str, Run]:
    import octavo
    from octavo import LLM, SamplingParams

    llm = LLM(
        model=model,
        device="cpu",
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=int(cache_gib / ranks * 2**30),
        tensor_parallel_size=ranks,
    )

    def run(work: Work) -> int:
        llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in work]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in work], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return octavo.__version__, run


def vllm_engine(
    model: str, max_model_len: int, max_num_seqs: int, cache_gib: float, dtype: str
) -> tuple[str, Run]:
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(cache_gib))))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}-{cores[-1]}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )

    def run(work: Work) -> int:
        llm.reset_prefix_cache()
        params: Any = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for _, count in work
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in work], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return vllm.__version__, run


def _shared(first: list[int], second: list[int]) -> int:
    """Length of the longest common prefix, less than either list's."""
    most = min(len(first), len(second)) - 1
    return next((i for i in range(most) if first[i] != second[i]), most)


def llama_engine(
    model: str, max_model_len: int, max_num_seqs: int, cache_gib: float, dtype: str
) -> tuple[str, Run]:
    """llama.cpp through its C interface: a sequence for each request, all prompts at once, then all in step.

    What the prompts have in common is computed once and copied, which stands for a prefix cache.
    """
    import llama_cpp as llama
    import numpy as np

    threads = len(os.sched_getaffinity(0))
    loaded = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
    if not loaded:
        raise SystemExit(f"llama.cpp cannot load {model}")
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(loaded))
    settings = llama.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = max_model_len * max_num_seqs, max_num_seqs
    settings.n_batch = max_model_len
    settings.n_threads = settings.n_threads_batch = threads
    context = llama.llama_init_from_model(loaded, settings)
    memory = llama.llama_get_memory(context)
    batch = llama.llama_batch_init(max_model_len, 0, 1)

    def decode(tokens: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run (token, position, sequence, whether to draw) -> the most likely next token of each sequence."""
        drawn = {}
        for begin in range(0, len(tokens), max_model_len):
            part = tokens[begin : begin + max_model_len]
            batch.n_tokens = len(part)
            for i, (token, position, sequence, draws) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, draws
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if code := llama.llama_decode(context, batch):
                raise SystemExit(f"llama_decode answered {code}")
            for i, (_, _, sequence, draws) in enumerate(part):
                if draws:
                    logits = llama.llama_get_logits_ith(context, i)
                    drawn[sequence] = int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())
        return drawn

    def run(work: Work) -> int:
        if len(work) > max_num_seqs:
            raise SystemExit(f"{len(work)} requests for {max_num_seqs} sequences")
        llama.llama_memory_clear(memory, False)
        first = work[0][0]
        shared = min((_shared(first, ids) for ids, _ in work[1:]), default=0)
        if shared:
            decode([(token, i, 0, False) for i, token in enumerate(first[:shared])])
            for sequence in range(1, len(work)):
                llama.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        drawn = decode(
            [
                (ids[i], i, sequence, i + 1 == len(ids))
                for sequence, (ids, _) in enumerate(work)
                for i in range(shared, len(ids))
            ]
        )
        made = len(work)
        for step in range(1, max(count for _, count in work)):
            going = [sequence for sequence, (_, count) in enumerate(work) if step < count]
            tokens = [(drawn[s], len(work[s][0]) + step - 1, s, True) for s in going]
            drawn |= decode(tokens)
            made += len(going)
        return made

    return llama.__version__, run


ENGINES: dict[str, Callable[..., tuple[str, Run]]] = {
    "octavo": octavo_engine,
    "vllm": vllm_engine,
    "llama.cpp": llama_engine,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, model, max_model_len, max_num_seqs, cache_gib, dtype = sys.argv[1:]
    kind, *ranks = kind.split("*")
    sizes = int(max_model_len), int(max_num_seqs), float(cache_gib)
    version, run = ENGINES[kind](model, *sizes, dtype, *map(int, ranks))
    print(json.dumps({"ready": version}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        began = time.perf_counter()
        tokens = run(work)
        answer = {"seconds": time.perf_counter() - began, "tokens": tokens}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
