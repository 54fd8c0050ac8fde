"""What a client asks of the sampler, range-checked once, here."""

from __future__ import annotations

import msgspec

from octavo.errors import InvalidRequest

MAX_LOGPROBS = 20  # alternatives per token a client may ask for, as OpenAI's limit
MAX_N = 128  # samples of one prompt


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one request.

    Defaults and ranges follow the OpenAI API and vLLM. ``top_k`` 0 or -1 is off. ``max_tokens`` None means
    the rest of the context. ``logprobs`` None is off; k gives the k most likely alternatives of each token
    beside its own. ``seed`` None is replaced by a random one when the request enters the engine.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    grammar: str | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raises ``InvalidRequest`` naming the setting."""
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        elif isinstance(self.stop, list):
            msgspec.structs.force_setattr(self, "stop", tuple(self.stop))
        for name in ("n", "top_k", "seed", "max_tokens", "logprobs"):
            _check_number(name, getattr(self, name), int)
        for name in ("temperature", "top_p"):
            _check_number(name, getattr(self, name), float)
        _check("n", self.n, 1 <= self.n <= MAX_N, f"between 1 and {MAX_N}")
        _check("temperature", self.temperature, 0 <= self.temperature <= 2, "between 0 and 2")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("top_k", self.top_k, -1 <= self.top_k < 2**31, "1 to 2147483647, or 0 or -1 for off")
        if self.seed is not None:
            _check("seed", self.seed, -(2**63) <= self.seed < 2**63, "a 64-bit integer")
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        if self.logprobs is not None:
            _check(
                "logprobs", self.logprobs, 0 <= self.logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"
            )
        strings = isinstance(self.stop, tuple) and all(isinstance(one, str) and one for one in self.stop)
        _check("stop", self.stop, strings, "non-empty strings")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken each time."""
        return self.temperature == 0


def _check_number(param: str, value: object, kind: type[int] | type[float]) -> None:
    if value is None and param in ("seed", "max_tokens", "logprobs"):
        return
    ok = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    _check(param, value, ok, "a whole number" if kind is int else "a number")


def _check(param: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise InvalidRequest(f"{param} is {value!r}: it must be {allowed}", param=param)
