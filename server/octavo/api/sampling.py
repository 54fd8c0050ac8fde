"""From a request's fields to ``SamplingParams``; the model's own ``generation_config.json`` gives the
defaults.
"""

from __future__ import annotations

from octavo.api.fields import Fields, wrong
from octavo.core.sampling_params import SamplingParams, StructuredOutputs
from octavo.errors import InvalidRequest

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's completions; a chat may fill the context


def sampling_params(fields: Fields, defaults: SamplingParams, chat: bool) -> SamplingParams:
    """Raises ``InvalidRequest`` naming the field, its value and what is allowed."""
    skip = fields.flag("skip_special_tokens", True)
    if fields.flag("spaces_between_special_tokens", False) and not skip:
        raise InvalidRequest(
            "spaces_between_special_tokens is true: not supported, none are added",
            param="spaces_between_special_tokens",
            code="unsupported_parameter",
        )
    max_tokens = _max_tokens(fields, defaults, chat)
    beams = fields.flag("use_beam_search", False)
    forms, where = structured_outputs(fields)
    if beams:  # the model's own defaults are for drawing
        defaults = SamplingParams()
        if forms is not None:
            raise no_beams(where.partition(".")[0])
    return SamplingParams(
        n=fields.integer("n", 1) or 0,
        temperature=fields.number("temperature", defaults.temperature),
        top_p=fields.number("top_p", defaults.top_p),
        top_k=fields.integer("top_k", defaults.top_k) or 0,
        min_p=fields.number("min_p", defaults.min_p),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        repetition_penalty=fields.number("repetition_penalty", defaults.repetition_penalty),
        logit_bias=fields.logit_bias(),
        allowed_token_ids=fields.token_ids("allowed_token_ids", empty=False),
        bad_words=fields.texts("bad_words"),
        seed=fields.integer("seed"),
        max_tokens=max_tokens,
        min_tokens=fields.integer("min_tokens", 0) or 0,
        stop=fields.stop(),
        stop_token_ids=fields.token_ids("stop_token_ids"),
        ignore_eos=fields.flag("ignore_eos", False),
        include_stop_str_in_output=fields.flag("include_stop_str_in_output", False),
        skip_special_tokens=skip,
        logprobs=_chat_logprobs(fields) if chat else fields.integer("logprobs"),
        prompt_logprobs=_prompt_logprobs(fields, chat),
        use_beam_search=beams,
        length_penalty=fields.number("length_penalty", 1.0),
        early_stopping=fields.flag("early_stopping", False),
        structured_outputs=forms,
    )


def no_beams(name: str) -> InvalidRequest:
    """The error for a field that asks for an output of a given form, beside ``use_beam_search``."""
    return InvalidRequest(f"{name} asks for a form: a beam search takes none, leave it out", param=name)


def structured_outputs(fields: Fields) -> tuple[StructuredOutputs | None, str]:
    """The form that the answer has to have, if any, and the field that says so."""
    asked = fields.object("structured_outputs")
    forms, where = _response_format(fields)
    if asked is None:
        return forms, where
    if forms is not None:
        raise InvalidRequest(
            "structured_outputs and response_format are both given: choose one", param="structured_outputs"
        )
    forms_known = StructuredOutputs.__struct_fields__
    if unknown := [name for name, value in asked.items() if name not in forms_known and value is not None]:
        raise InvalidRequest(
            f"structured_outputs.{unknown[0]} is not supported: give one of {', '.join(forms_known)}",
            param="structured_outputs",
            code="unsupported_parameter",
        )
    return StructuredOutputs(**{name: asked.get(name) for name in forms_known}), "structured_outputs"


def _response_format(fields: Fields) -> tuple[StructuredOutputs | None, str]:
    asked = fields.object("response_format")
    kind = "text" if asked is None else asked.get("type")
    if asked is None or kind == "text":
        return None, "response_format"
    if kind not in ("json_object", "json_schema"):
        allowed = "text, json_object or json_schema"
        raise InvalidRequest(
            f"response_format.type is {kind!r:.100}: it must be {allowed}", param="response_format"
        )
    if kind == "json_object" and asked.get("schema") is None:
        return StructuredOutputs(json_object=True), "response_format"
    held, where = asked.get("json_schema"), "response_format.json_schema.schema"
    if kind == "json_object":  # clients of some servers put the schema beside it
        held, where = asked, "response_format.schema"
    schema = held.get("schema") if isinstance(held, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where} is {schema!r:.100}: it must be a JSON schema", param="response_format")
    return StructuredOutputs(json=schema), where


def _max_tokens(fields: Fields, defaults: SamplingParams, chat: bool) -> int | None:
    if not chat:
        asked = fields.integer("max_tokens", DEFAULT_COMPLETION_TOKENS)
        return 1 if prompt_only(fields) else asked
    name = "max_completion_tokens" if fields.body.get("max_completion_tokens") is not None else "max_tokens"
    value = fields.integer(name, defaults.max_tokens)
    if value is not None and value < 1:
        raise wrong(name, value, "at least 1")
    return value


def prompt_only(fields: Fields) -> bool:
    """A completion that echoes its prompt and makes no token: one is drawn, and thrown away."""
    return fields.flag("echo", False) and fields.integer("max_tokens") == 0


def _prompt_logprobs(fields: Fields, chat: bool) -> int | None:
    """What was asked for, or what an echoed prompt is shown with, if that is more."""
    asked = fields.integer("prompt_logprobs")
    echoed = fields.integer("logprobs") if not chat and fields.flag("echo", False) else None
    return asked if echoed is None or (asked or 0) < 0 else max(asked or 0, echoed)


def _chat_logprobs(fields: Fields) -> int | None:
    asked = fields.flag("logprobs", False)
    top = fields.integer("top_logprobs")
    if top is not None and top < 0:
        raise wrong("top_logprobs", top, "at least 0")
    if top and not asked:
        raise InvalidRequest(f"top_logprobs is {top}: it needs logprobs true", param="top_logprobs")
    return (top or 0) if asked else None
