"""Render a chat with the model's Jinja template, in the sandbox and with the names that Hugging Face
templates expect.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from octavo.errors import InvalidRequest, ModelLoadError
from octavo.prompt.messages import Form


class ChatTemplate:
    """A compiled template. ``render`` is thread safe.

    ``content_form``: "openai" where it loops over the parts of a message's content, "given" where it also
    tells them from a string, "string" where it does neither. ``reads_null``: it asks whether a content is
    none; another one, which may join contents to strings, is to be given "" in its place.
    """

    def __init__(self, source: str) -> None:
        """Raises ``ModelLoadError`` when the template does not compile."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelLoadError(f"the chat template does not compile: {error}") from error
        loops = any(_is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))
        tests = (test for test in tree.find_all(jinja2.nodes.Test) if test.name == "string")
        told = any(_is_content(test.node) for test in tests)
        self.content_form: Form = "string" if not loops else "given" if told else "openai"
        self.reads_null = any(_asks_for_none(node) for node in tree.find_all(jinja2.nodes.Expr))

    def render(self, names: dict[str, Any]) -> str:
        """The text of a chat; ``names`` are what the template may use.

        Raises ``InvalidRequest`` with the template's own message when it refuses the messages or fails.
        """
        try:
            return self._template.render(names)
        except _TemplateRefusal as error:
            raise InvalidRequest(str(error), param="messages") from error
        except RecursionError as error:
            raise InvalidRequest(
                "the messages are nested too deeply for the chat template", param="messages"
            ) from error
        except (
            Exception
        ) as error:  # a template is a program: whatever it raises is about this request's messages
            message = f"the chat template failed on these messages: {type(error).__name__}: {error}"
            raise InvalidRequest(message, param="messages") from error


def _is_content(node: jinja2.nodes.Node) -> bool:
    """Whether an expression is ``message.content``, ``message['content']`` or ``content``, or filters it."""
    if isinstance(node, jinja2.nodes.Filter) and node.node is not None:
        return _is_content(node.node)
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Name) and node.name == "content"


def _asks_for_none(node: jinja2.nodes.Node) -> bool:
    """Whether an expression is ``message.content is none``, or compares it with none."""
    if isinstance(node, jinja2.nodes.Test):
        return node.name == "none" and _is_content(node.node)
    if not isinstance(node, jinja2.nodes.Compare) or not _is_content(node.expr):
        return False
    return any(isinstance(one.expr, jinja2.nodes.Const) and one.expr.value is None for one in node.ops)


class _TemplateRefusal(jinja2.TemplateError):
    """What ``raise_exception`` in a template raises."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what the model wrote, for training; here its body is
    just text.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which a model should not read."""
    settings: dict[str, Any] = {"ensure_ascii": False, "indent": None, "separators": None, "sort_keys": False}
    return json.dumps(value, **{**settings, **options})


Render = Callable[[dict[str, Any]], str]
_CONTINUE = "OCTAVO-CONTINUES-HERE"  # put after the last message, found again in the rendered text


def render_continued(render: Render, names: dict[str, Any]) -> str:
    """The chat up to the end of the last message's own text, so that the model goes on writing that
    message.
    """
    messages = names["messages"]
    content = messages[-1].get("content")
    parts = content if isinstance(content, list) and content else [{"type": "text", "text": content}]
    text = parts[-1]["text"]
    if not isinstance(text, str) or not text.strip():
        raise InvalidRequest(
            "continue_final_message is true but the last message has no text to continue",
            param="continue_final_message",
        )
    parts = [*parts[:-1], {**parts[-1], "text": text + _CONTINUE + " "}]
    changed = parts if isinstance(content, list) else parts[-1]["text"]
    marked = [*messages[:-1], {**messages[-1], "content": changed}]
    rendered = render({**names, "messages": marked})
    place = rendered.rfind(_CONTINUE)
    if place < 0:
        raise InvalidRequest(
            "continue_final_message is true but this model's chat template drops the last message",
            param="continue_final_message",
        )
    kept = rendered[:place]
    # A template that strips messages would have stripped this one's trailing spaces too.
    return kept if rendered.startswith(_CONTINUE + " ", place) else kept.rstrip()
