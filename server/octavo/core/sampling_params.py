"""What a client asks of the sampler, range-checked once, here."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.errors import InvalidRequest

MAX_N = 128  # samples of one prompt
MAX_BIAS = 100.0  # a larger logit bias, of either sign, is cut to it, as OpenAI's
MAX_BAD_WORDS = 256  # each is compared with the last tokens at every step
MAX_FLOAT = sys.float_info.max
MAX_TOKEN_ID = 2**31 - 1  # larger ones are no model's; the engine knows this one's


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """A form that the output has to have; exactly one is set.

    ``json``: a JSON schema, as an object or its text. ``regex``: matched whole. ``choice``: one of these
    texts. ``grammar``: an EBNF grammar, in GBNF or in Lark's notation. ``json_object``: any JSON object.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        """Raises ``InvalidRequest`` naming the form."""
        _listed(self, "choice")
        for name, (allowed, holds) in _FORMS.items():
            value = getattr(self, name)
            _check(f"structured_outputs.{name}", value, value is None or holds(value), allowed)
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            said = " and ".join(given) or "none"
            raise InvalidRequest(
                f"structured_outputs has {said}: give exactly one of {', '.join(_FORMS)}",
                param="structured_outputs",
            )


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one request.

    Defaults and ranges follow the OpenAI API and vLLM. ``top_k`` 0 or -1 is off. ``max_tokens`` None means
    the rest of the context. ``logprobs`` and ``prompt_logprobs`` None are off; k gives the k most likely
    alternatives of each token beside its own. ``seed`` None is replaced by a random one when the request
    enters the engine.

    The penalties count output tokens (presence, frequency) or all (repetition); ``logit_bias`` is cut to
    +-100; ``bad_words`` are texts that do not appear, ``bad_words_token_ids`` the same in tokens;
    ``min_tokens`` keeps stop tokens away until so many are there. ``structured_outputs`` is the form of the
    output, ``grammar`` the same compiled (``octavo.sampling.grammar``).

    With ``use_beam_search`` n beams are kept and returned, best first, by their log probability over length
    to the power of ``length_penalty``; ``early_stopping`` ends the search with n finished ones. A search
    draws nothing, so it takes no other setting that changes the distribution.
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
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raises ``InvalidRequest`` naming the setting."""
        if isinstance(self.stop, str):
            _set(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "bad_words_token_ids"):
            _listed(self, name)
        if isinstance(self.bad_words_token_ids, tuple):
            words = tuple(tuple(w) if isinstance(w, list) else w for w in self.bad_words_token_ids)
            _set(self, "bad_words_token_ids", words)
        for name, (kind, allowed, holds) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            types = (int,) if kind == "a whole number" else (int, float)
            _check(name, value, isinstance(value, types) and not isinstance(value, bool), kind)
            _check(name, value, holds(value), allowed)
            if kind == _NUMBER:  # a whole number may be too large to go to the engine as one
                _set(self, name, float(value))
        for name in _FLAGS:
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false")
        for name in ("stop", "bad_words"):
            _check(name, getattr(self, name), _texts(getattr(self, name)), "non-empty strings")
        for name in ("stop_token_ids", "allowed_token_ids"):
            _check(name, getattr(self, name), _ids(getattr(self, name)), "token ids")
        words = self.bad_words_token_ids
        sequences = isinstance(words, tuple) and all(word and _ids(word) for word in words)
        _check("bad_words_token_ids", words, sequences, "non-empty lists of token ids")
        for name, most in (("bad_words", MAX_BAD_WORDS), ("bad_words_token_ids", 2 * MAX_BAD_WORDS)):
            if (count := len(getattr(self, name))) > most:  # twice: each text has two spellings
                raise InvalidRequest(f"{name} holds {count}: at most {most}", param=name)
        forms = self.structured_outputs
        known = forms is None or isinstance(forms, StructuredOutputs)
        _check("structured_outputs", forms, known, "a StructuredOutputs")
        _check("grammar", self.grammar, self.grammar is None or isinstance(self.grammar, str), "a string")
        self._check_bias()
        self._check_together()

    def _check_bias(self) -> None:
        bias = self.logit_bias
        ok = isinstance(bias, dict) and _ids(tuple(bias)) and all(map(_is_number, bias.values()))
        _check("logit_bias", bias, ok, "an object of token ids and numbers")
        if any(abs(value) > MAX_BIAS for value in bias.values()):
            _set(self, "logit_bias", {key: max(-MAX_BIAS, min(MAX_BIAS, bias[key])) for key in bias})

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"{self.min_tokens}: above max_tokens, which is {self.max_tokens}")
        banned = {word[0] for word in self.bad_words_token_ids if len(word) == 1}
        if self.allowed_token_ids and banned.issuperset(self.allowed_token_ids):
            _refuse("allowed_token_ids", f"{self.allowed_token_ids!r:.100}: bad_words ban them all")
        if self.ignore_eos and (self.structured_outputs is not None or self.grammar is not None):
            _refuse("ignore_eos", "true: an output of a given form ends where the form does")
        if self.use_beam_search:
            for name, off in _NO_BEAMS.items():
                value = getattr(self, name)
                if value != off:
                    _refuse(name, f"{value!r:.100}: a beam search takes none, leave it out")
            if self.temperature not in (0, 1):
                _refuse("temperature", f"{self.temperature}: a beam search draws nothing, leave it out")
        else:
            for name, off in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != off:
                    _refuse(name, f"{getattr(self, name)!r}: it needs use_beam_search true")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ``InvalidRequest`` naming the setting and the token id that the model does not have."""
        words = tuple(token for word in self.bad_words_token_ids for token in word)
        for name, tokens in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("logit_bias", tuple(self.logit_bias)),
            ("bad_words_token_ids", words),
        ):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise InvalidRequest(f"{name} holds {token}: ids are 0 to {vocab_size - 1}", param=name)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken each time."""
        return self.temperature == 0 and not self.use_beam_search


_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "json": ("a JSON schema", lambda value: isinstance(value, (dict, str))),
    "regex": ("a string", lambda value: isinstance(value, str)),
    "choice": ("a list of non-empty strings", lambda value: bool(value) and _texts(value)),
    "grammar": ("a string", lambda value: isinstance(value, str)),
    "json_object": ("true or false", lambda value: isinstance(value, bool)),
}
_WHOLE, _NUMBER = "a whole number", "a number"
_OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_FLAGS = (
    "use_beam_search", "early_stopping", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
_RANGES: dict[str, tuple[str, str, Callable[[Any], bool]]] = {
    "n": (_WHOLE, f"between 1 and {MAX_N}", lambda n: 1 <= n <= MAX_N),
    "temperature": (_NUMBER, "between 0 and 2", lambda t: 0 <= t <= 2),
    "top_p": (_NUMBER, "above 0 and at most 1", lambda p: 0 < p <= 1),
    "top_k": (_WHOLE, "1 to 2147483647, or 0 or -1 for off", lambda k: -1 <= k < 2**31),
    "seed": (_WHOLE, "a 64-bit integer", lambda seed: -(2**63) <= seed < 2**63),
    "max_tokens": (_WHOLE, "at least 1", lambda n: n >= 1),
    "min_p": (_NUMBER, "between 0 and 1", lambda p: 0 <= p <= 1),
    "presence_penalty": (_NUMBER, "between -2 and 2", lambda p: -2 <= p <= 2),
    "frequency_penalty": (_NUMBER, "between -2 and 2", lambda p: -2 <= p <= 2),
    "repetition_penalty": (_NUMBER, "above 0", lambda p: 0 < p <= MAX_FLOAT),
    "min_tokens": (_WHOLE, "at least 0", lambda n: n >= 0),
    "logprobs": (_WHOLE, "at least 0", lambda k: k >= 0),
    "prompt_logprobs": (_WHOLE, "at least 0", lambda k: k >= 0),
    "length_penalty": (_NUMBER, "between -10 and 10", lambda p: -10 <= p <= 10),
}
_NO_BEAMS: dict[str, Any] = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "logit_bias": {}, "allowed_token_ids": (), "bad_words": (),
    "bad_words_token_ids": (), "min_tokens": 0, "structured_outputs": None, "grammar": None, "stop": (),
}  # fmt: skip


def _listed(holder: msgspec.Struct, name: str) -> None:
    """A list becomes a tuple, so that the settings cannot change."""
    if isinstance(value := getattr(holder, name), list):
        _set(holder, name, tuple(value))


_set = msgspec.structs.force_setattr


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _ids(values: object) -> bool:
    return isinstance(values, tuple) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= MAX_TOKEN_ID for one in values
    )


def _texts(values: object) -> bool:
    return isinstance(values, tuple) and all(isinstance(one, str) and one for one in values)


def _check(param: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        field = param.partition(".")[0]
        raise InvalidRequest(f"{param} is {value!r:.100}: it must be {allowed}", param=field)


def _refuse(param: str, why: str) -> None:
    raise InvalidRequest(f"{param} is {why}", param=param)
