"""From what a request asks to what changes its logits."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.outputs import EngineRequest
from octavo.core.plan import LogitRules


def logit_rules(request: EngineRequest, eos_token_ids: Iterable[int]) -> LogitRules | None:
    """The rules for every draw of this request; None when nothing changes its logits.

    ``eos_token_ids`` are all ids that end a sequence of this model; while ``min_tokens`` are not there, they
    are banned together with the request's own stop tokens. Tokens made elsewhere before count as output.
    """
    sampling = request.sampling
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    min_tokens = sampling.min_tokens if ends else 0
    rules = LogitRules(
        num_prompt_tokens=len(request.prompt_token_ids) - request.num_prior_output_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words_token_ids,
        min_tokens=min_tokens,
        banned_until=tuple(sorted(ends)) if min_tokens else (),
        grammar=sampling.grammar,
    )
    return None if rules == LogitRules(num_prompt_tokens=rules.num_prompt_tokens) else rules
