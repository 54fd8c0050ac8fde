"""The evaluation harness lm-eval scores a model through our server as it does through transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
from gguf_reference import find_smollm2, load_gguf

from octavo.prompt.assets import load_assets

pytestmark = pytest.mark.usefixtures("only_this_machine")

CLOSE = 1e-3  # of the log-likelihood of a continuation: two float32 implementations, some ten tokens
LENGTH = 512
CAPITALS = """
Argentina Buenos Aires; Australia Canberra; Austria Vienna; Belgium Brussels; Brazil Brasilia;
Bulgaria Sofia; Canada Ottawa; Chile Santiago; China Beijing; Colombia Bogota; Croatia Zagreb; Cuba
Havana; Denmark Copenhagen; Egypt Cairo; Estonia Tallinn; Ethiopia Addis Ababa; Finland Helsinki;
France Paris; Germany Berlin; Ghana Accra; Greece Athens; Hungary Budapest; Iceland Reykjavik; India
New Delhi; Indonesia Jakarta; Iran Tehran; Iraq Baghdad; Ireland Dublin; Israel Jerusalem; Italy
Rome; Japan Tokyo; Kenya Nairobi; Latvia Riga; Lebanon Beirut; Libya Tripoli; Mongolia Ulaanbaatar;
Morocco Rabat; Nepal Kathmandu; Norway Oslo; Pakistan Islamabad; Peru Lima; Poland Warsaw; Portugal
Lisbon; Romania Bucharest; Russia Moscow; Spain Madrid; Sweden Stockholm; Thailand Bangkok; Turkey
Ankara; Vietnam Hanoi
"""


def items(**_: Any) -> dict[str, Any]:
    """100 questions with two answers each; the wrong one is right elsewhere."""
    import datasets

    pairs = [entry.split(maxsplit=1) for entry in CAPITALS.replace("\n", " ").split("; ")]
    pairs = [(country.strip(), capital.strip()) for country, capital in pairs]
    rows = []
    for number, (country, capital) in enumerate(pairs):
        options = [pairs[(number + step) % len(pairs)] for step in (0, 7)][:: 1 - 2 * (number % 2)]
        right = options.index((country, capital))
        rows += [
            {"asked": f"The capital of {country} is", "answers": [one[1] for one in options], "right": right},
            {"asked": f"{capital} is the capital of", "answers": [one[0] for one in options], "right": right},
        ]
    assert len(rows) == 100
    return {"test": datasets.Dataset.from_list(rows)}


TASK = {
    "task": "capitals", "custom_dataset": items, "test_split": "test", "output_type": "multiple_choice",
    "doc_to_text": "{{asked}}", "doc_to_choice": "{{answers}}", "doc_to_target": "right",
    "metric_list": [
        {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def smollm2(serve: Any, smollm2_address: str) -> Iterator[Any]:
    settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": "64Mi", "max_model_len": LENGTH}
    with serve(None, smollm2_address, **settings) as running:
        yield running


def evaluate(model: Any, limit: int | None = None) -> tuple[dict[str, Any], list[list[tuple[float, bool]]]]:
    """Scores, and for each item the log-likelihood of each answer and whether it is the likeliest text."""
    import lm_eval

    found = lm_eval.simple_evaluate(
        model=model, tasks=[dict(TASK)], limit=limit, log_samples=True, bootstrap_iters=0,
        task_manager=lm_eval.tasks.TaskManager(include_defaults=False),  # its own are thousands of files
    )  # fmt: skip
    scores = found["results"]["capitals"]
    samples = sorted(found["samples"]["capitals"], key=lambda one: one["doc_id"])
    assert len(samples) == (limit or 100)
    return {name: scores[f"{name},none"] for name in ("acc", "acc_norm")}, [
        [answer[0] for answer in sample["resps"]] for sample in samples
    ]


@pytest.fixture(scope="module")
def by_transformers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What lm-eval finds with transformers' own reading of the same weights, in float32."""
    import torch
    import transformers
    from lm_eval.models.huggingface import HFLM

    path = find_smollm2()
    model = load_gguf(path, tmp_path_factory.mktemp("slim"))
    assets = load_assets(path)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(assets.tokenizer_json), **assets.special_tokens
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside the server's more of them wait for each other, five times as long
    try:
        return evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer, max_length=LENGTH, batch_size=24, device="cpu")
        )
    finally:
        torch.set_num_threads(threads)


def check_equal(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=CLOSE)
        assert [likeliest for _, likeliest in ours] == [likeliest for _, likeliest in theirs]


def local_completions(running: Any, **settings: Any) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    url = f"{running.url}/v1/completions"
    return LocalCompletionsAPI(model="tiny", base_url=url, max_length=LENGTH, max_retries=1, **settings)


def test_scores_and_likelihoods_are_those_of_transformers(smollm2: Any, by_transformers: Any) -> None:
    """Prompts go as tokens, which our tokenizer makes for the harness."""
    model = local_completions(smollm2, batch_size=24)
    assert (model.tokenizer_backend, model.tokenized_requests) == ("remote", True)
    scores, found = evaluate(model)
    expected, theirs = by_transformers
    check_equal(found, theirs)
    assert scores == expected and 0.5 < scores["acc"] < 1


def test_so_are_they_where_prompts_go_as_texts_and_many_at_once(smollm2: Any, by_transformers: Any) -> None:
    model = local_completions(smollm2, tokenized_requests=False, num_concurrent=4)
    check_equal(evaluate(model, limit=8)[1], by_transformers[1][:8])
