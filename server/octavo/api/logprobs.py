"""Log-probabilities in OpenAI's two forms: of chats (a list of objects) and of completions (parallel
lists).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.core.plan import TokenLogprobs
from octavo.prompt.renderer import PromptRenderer

LOWEST = -9999.0  # in place of minus infinity, which JSON has not


def token_name(renderer: PromptRenderer, token_id: int, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id else renderer.token_text(token_id)


def chat_logprobs(
    renderer: PromptRenderer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], as_ids: bool
) -> dict[str, Any]:
    """``{"content": [{token, logprob, bytes, top_logprobs}]}``, one entry for each token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = renderer.token_bytes(token_id)
        name = token_name(renderer, token_id, as_ids)
        return {"token": name, "logprob": max(logprob, LOWEST), "bytes": list(data)}

    content = [
        {**entry(token_id, one.logprob), "top_logprobs": [entry(*top) for top in one.top]}
        for token_id, one in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    renderer: PromptRenderer,
    prompt: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    number: int,
    as_ids: bool,
) -> list[dict[str, Any] | None]:
    """vLLM's form: for each prompt token ``{token_id: {logprob, rank, decoded_token}}``, its own first, then
    the ``number`` most likely; None for the first token, which nothing comes before.
    """

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        name = token_name(renderer, token_id, as_ids)
        return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": name}

    entries: list[dict[str, Any] | None] = [None]
    for token_id, one in zip(prompt[1:], logprobs, strict=True):
        shown = {str(token_id): entry(token_id, one.logprob, one.rank)}
        for rank, (other, logprob) in enumerate(one.top[:number], 1):
            shown.setdefault(str(other), entry(other, logprob, rank))
        entries.append(shown)
    return entries


class CompletionLogprobs:
    """Builds ``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`` of one choice, chunk by
    chunk.
    """

    def __init__(self, renderer: PromptRenderer, as_ids: bool) -> None:
        self._renderer = renderer
        self._as_ids = as_ids
        self._offset = 0

    def prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], number: int
    ) -> dict[str, Any]:
        """The lists for an echoed prompt; of its first token nothing is known."""
        first, rest = token_ids[:1], token_ids[1:]
        scores = [TokenLogprobs(one.logprob, one.rank, one.top[:number]) for one in logprobs]
        whole = joined([self.chunk(first, [TokenLogprobs(0.0, 0, [])]), self.chunk(rest, scores)])
        whole["token_logprobs"][0] = whole["top_logprobs"][0] = None
        return whole

    def chunk(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The lists for these tokens; in ``top_logprobs`` the token itself comes first. Offsets count
        characters of the tokens' own texts, from the choice's start.
        """
        tokens, values, tops, offsets = [], [], [], []
        for token_id, one in zip(token_ids, logprobs, strict=True):
            name = token_name(self._renderer, token_id, self._as_ids)
            tokens.append(name)
            values.append(max(one.logprob, LOWEST))
            offsets.append(self._offset)
            self._offset += len(self._renderer.token_text(token_id))
            top = {name: max(one.logprob, LOWEST)}
            for other, logprob in one.top:
                top.setdefault(token_name(self._renderer, other, self._as_ids), max(logprob, LOWEST))
            tops.append(top)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Chunks of either form as one."""
    whole: dict[str, Any] = {}
    for chunk in chunks:
        for name, value in chunk.items():
            whole[name] = whole.get(name, []) + value if isinstance(value, list) else value
    return whole
