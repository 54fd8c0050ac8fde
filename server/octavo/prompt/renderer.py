"""From a request's JSON body to token ids, and from token ids to text. The API and the router call the same
functions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import tokenizers

from octavo.errors import ContextLengthExceeded, InvalidRequest, ModelLoadError
from octavo.prompt.assets import PromptAssets
from octavo.prompt.chat_template import ChatTemplate, render_continued
from octavo.prompt.legacy import with_tools
from octavo.prompt.messages import Form, template_messages
from octavo.prompt.pieces import PieceTable
from octavo.prompt.tools.definitions import parse_tools

# Names the renderer itself gives a template: a request sets them by their own fields.
_RESERVED = ("messages", "add_generation_prompt", "tools", "documents", "continue_final_message")

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

# How much text is tokenised at first of one that may be too long, in characters for each token that fits.
_FIRST_CHARACTERS = 8


class PromptRenderer:
    """Tokenizer and chat template of one model. Its methods are thread safe, and release the GIL while they
    tokenise.
    """

    def __init__(self, assets: PromptAssets) -> None:
        """Raises ``ModelLoadError`` when the tokenizer or the template cannot be used."""
        self.assets = assets
        try:
            self.tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(assets.tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(f"the model's tokenizer cannot be read: {error}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.template = ChatTemplate(assets.chat_template) if assets.chat_template is not None else None
        self.pieces = PieceTable(self.tokenizer)

    def render(self, body: dict[str, Any]) -> str:
        """The text of a chat request, its template applied.

        Reads ``messages``, ``tools`` or ``functions``, ``documents``, ``reasoning_effort``,
        ``add_generation_prompt`` (default true), ``continue_final_message``, ``chat_template`` and
        ``chat_template_kwargs``. Raises ``InvalidRequest``.
        """
        body = with_tools(body)
        template = self._template(body.get("chat_template"))
        form: Form = template.content_form if template is not None else "string"
        if self.assets.content_format != "auto":
            form = self.assets.content_format
        messages = template_messages(body.get("messages"), form)
        if template is None:
            raise InvalidRequest(
                "this model has no chat template: send text to /v1/completions instead", param="messages"
            )
        if not template.reads_null:
            messages = [{**m, "content": ""} if m["content"] is None else m for m in messages]
        if "developer" not in template.source:  # OpenAI's newer name of the system role
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        continued = _flag(body, "continue_final_message", False)
        generation = _flag(body, "add_generation_prompt", not continued)
        if continued and generation:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt are both true: choose one",
                param="continue_final_message",
            )
        parse_tools(tools := body.get("tools"))  # what is wrong is named before the template fails on it
        names = {
            **self.assets.special_tokens,
            **self.assets.default_chat_template_kwargs,
            **_reasoning_effort(body.get("reasoning_effort")),
            **_template_kwargs(body.get("chat_template_kwargs")),
            "messages": messages,
            "tools": [_with_parameters(tool) for tool in tools] if tools else None,
            "documents": _documents(body.get("documents")),
            "add_generation_prompt": generation,
        }
        return render_continued(template.render, names) if continued else template.render(names)

    def _template(self, source: Any) -> ChatTemplate | None:
        """The model's chat template, or the request's own."""
        if source is None:
            return self.template
        if not isinstance(source, str):
            raise InvalidRequest(
                f"chat_template is {source!r:.80}: it must be a string", param="chat_template"
            )
        if not self.assets.request_templates:
            raise InvalidRequest(
                "chat_template: this server takes no templates from requests; it does when started with "
                "--trust-request-chat-template",
                param="chat_template",
            )
        try:
            return _compiled(source)
        except ModelLoadError as error:
            raise InvalidRequest(error.message, param="chat_template") from error

    def chat(self, body: dict[str, Any], longest: int | None = None) -> list[int]:
        """Token ids of a chat request. ``longest``: as in ``encode``."""
        return self.chat_tokens(self.render(body), longest)

    def chat_tokens(self, rendered: str, longest: int | None = None) -> list[int]:
        """Token ids of a rendered chat. The template writes special tokens itself, so none are added."""
        try:
            ids = self.encode(rendered, add_special_tokens=False, longest=longest)
        except ContextLengthExceeded as error:
            raise ContextLengthExceeded(error.message, param="messages") from error
        if not ids:
            raise InvalidRequest("the chat template made an empty prompt of these messages", param="messages")
        return ids

    def completion(
        self, prompt: Any, add_special_tokens: bool = True, longest: int | None = None
    ) -> list[list[int]]:
        """Token ids of each prompt: a string, a list of strings, a list of ids, or a list of lists of ids.

        Strings get the tokenizer's own special tokens (BOS where the model has it); ids are taken as they
        are. Raises ``InvalidRequest`` naming the prompt that is empty, of the wrong type, or out of the
        vocabulary. ``longest``: as in ``encode``.
        """
        if isinstance(prompt, str):
            return [self._text(prompt, "prompt", add_special_tokens, longest)]
        if not isinstance(prompt, list):
            raise InvalidRequest(
                f"prompt must be a string, a list of strings or token ids, not {prompt!r:.80}", param="prompt"
            )
        if not prompt:
            raise InvalidRequest("prompt is an empty list: give at least one prompt", param="prompt")
        if all(_is_id(token) for token in prompt):
            return [self._ids(prompt, "prompt")]
        prompts = []
        for index, one in enumerate(prompt):
            where = f"prompt[{index}]"
            if isinstance(one, str):
                prompts.append(self._text(one, where, add_special_tokens, longest))
            elif isinstance(one, list):
                prompts.append(self._ids(one, where))
            else:
                raise InvalidRequest(
                    f"{where} is {one!r:.80}: it must be a string or a list of token ids", param="prompt"
                )
        return prompts

    def encode(self, text: str, add_special_tokens: bool = True, longest: int | None = None) -> list[int]:
        """Token ids of ``text``. Raises ``InvalidRequest`` when it is not valid Unicode (a lone surrogate).

        A text whose beginning alone makes more than twice ``longest`` tokens raises
        ``ContextLengthExceeded``; the rest is not tokenised, which takes 200 bytes of memory a token and,
        over megabytes, minutes.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text is not valid Unicode: {error.reason} at character {error.start}"
            ) from error
        if longest is not None:
            self._refuse_far_too_long(text, longest)
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
            0
        ].ids
        return ids

    def _refuse_far_too_long(self, text: str, longest: int) -> None:
        """Twice as many, because a text cut in a word may make more tokens than the whole."""
        size = _FIRST_CHARACTERS * longest
        while size < len(text):
            made = len(self._encode(text[:size], False))
            if made > 2 * longest:
                raise ContextLengthExceeded(
                    f"the prompt is too long: the first {size} of {len(text)} characters make {made} tokens, "
                    f"which exceeds the maximum number of tokens allowed, {longest}: shorten the prompt",
                    param="prompt",
                )
            size *= 2

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``; ids outside the vocabulary are left out."""
        text: str = self.tokenizer.decode(
            [token for token in token_ids if token in self.pieces], skip_special_tokens=skip_special_tokens
        )
        return text

    def token_text(self, token_id: int) -> str:
        """How the vocabulary spells one token, decoded alone; incomplete UTF-8 shows as U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for (empty for an id outside the vocabulary)."""
        return self.pieces.bytes_of(token_id)

    def _text(self, text: str, where: str, add_special_tokens: bool, longest: int | None) -> list[int]:
        try:
            ids = self.encode(text, add_special_tokens, longest)
        except ContextLengthExceeded:
            raise
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error.message}", param="prompt") from error
        if not ids:
            raise InvalidRequest(f"{where} is empty: give at least one token", param="prompt")
        return ids

    def _ids(self, ids: list[Any], where: str) -> list[int]:
        if not ids:
            raise InvalidRequest(f"{where} is empty: give at least one token", param="prompt")
        size = self.assets.vocab_size
        for index, token in enumerate(ids):
            if not _is_id(token):
                raise InvalidRequest(
                    f"{where}[{index}] is {token!r:.80}: it must be a token id", param="prompt"
                )
            if not 0 <= token < size:
                raise InvalidRequest(
                    f"{where}[{index}] is {token}: token ids of this model are 0 to {size - 1}",
                    param="prompt",
                )
        return list(ids)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _flag(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {value!r:.80}: it must be true or false", param=name)
    return value


@lru_cache(maxsize=16)
def _compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def _reasoning_effort(value: Any) -> dict[str, Any]:
    """Templates of models that reason more or less read ``reasoning_effort``, of those that reason or do not
    ``enable_thinking``.
    """
    if value is None:
        return {}
    if value not in _EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort is {value!r:.80}: it must be one of {', '.join(_EFFORTS)}",
            param="reasoning_effort",
        )
    return {"reasoning_effort": value, **({"enable_thinking": False} if value == "none" else {})}


def _with_parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """Many templates fail on a tool without."""
    function = tool["function"]
    if function.get("parameters") is not None:
        return tool
    return {**tool, "function": {**function, "parameters": {"type": "object", "properties": {}}}}


def _documents(value: Any) -> list[dict[str, Any]] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise InvalidRequest(
            f"documents is {value!r:.80}: it must be a list of objects (title and text)", param="documents"
        )
    return value


def _template_kwargs(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"chat_template_kwargs is {value!r:.80}: it must be an object", param="chat_template_kwargs"
        )
    for name in _RESERVED:
        if name in value:
            raise InvalidRequest(
                f"chat_template_kwargs may not hold {name}: it is a field of the request",
                param="chat_template_kwargs",
            )
    return value
