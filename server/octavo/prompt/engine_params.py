"""From what a client asks, in texts, to what the engine takes, in tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.core.sampling_params import SamplingParams
from octavo.prompt.renderer import PromptRenderer


def engine_params(
    sampling: SamplingParams, renderer: PromptRenderer, *, seed: int, max_tokens: int
) -> SamplingParams:
    """The settings of one engine request: stop strings are looked for in the text, bad words become tokens.

    ``sampling.grammar`` is set already where the output has to have a form.
    """
    words = (*sampling.bad_words_token_ids, *spellings(renderer, sampling.bad_words))
    return msgspec.structs.replace(
        sampling, n=1, stop=(), seed=seed, max_tokens=max_tokens, structured_outputs=None, bad_words=(),
        bad_words_token_ids=words,
    )  # fmt: skip


def spellings(renderer: PromptRenderer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word, at the start of a text and after a space, as vLLM."""
    texts = [f"{space}{word.lstrip()}" for word in words for space in ("", " ")]
    ids = (tuple(renderer.encode(text, add_special_tokens=False)) for text in texts)
    return tuple(dict.fromkeys(each for each in ids if each))
