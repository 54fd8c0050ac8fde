"""How the answers to one chat request are read, and what they are held to for its tools."""

from __future__ import annotations

from typing import Any

from octavo.config import EngineConfig
from octavo.errors import InvalidRequest
from octavo.prompt.renderer import PromptRenderer
from octavo.prompt.tools.definitions import Tool, ToolChoice, parse_tool_choice, parse_tools
from octavo.prompt.tools.formats import (
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    tool_format,
)
from octavo.prompt.tools.grammar import ANSWER, Unsupported, reasoning_first, tool_grammar
from octavo.prompt.tools.parser import OutputParser

_FALLBACK = "hermes"  # in which calls are enforced where the model has no format of its own


class OutputReading:
    """Of one chat request. ``tools`` are those that may be called; ``reasoning`` is None where none is told
    from the answer.
    """

    def __init__(
        self,
        config: EngineConfig,
        renderer: PromptRenderer,
        body: dict[str, Any],
        rendered: str,
        parallel: bool,
    ) -> None:
        """``rendered``: the prompt. Raises ``InvalidRequest`` naming the field."""
        tools = parse_tools(body.get("tools"))
        self.choice: ToolChoice = parse_tool_choice(body.get("tool_choice"), tools)
        self._template = body.get("chat_template") or renderer.assets.chat_template or ""
        form = tool_format(config.tool_call_parser, self._template)
        if self.choice.mode == "auto" and (form is None or not config.enable_auto_tool_choice):
            raise InvalidRequest(
                "tool_choice is 'auto': the server runs without --enable-auto-tool-choice"
                if form is not None
                else "tool_choice is 'auto': the model's chat template shows no format of tool calls; start "
                "the server with --tool-call-parser, or require a call",
                param="tool_choice",
            )
        self.tools: tuple[Tool, ...] = ()
        self._form: ToolFormat | None = None
        if self.choice.mode != "none":
            self._form = form or TOOL_FORMATS[_FALLBACK]
            self.tools = tuple(
                tool for tool in tools if self.choice.names is None or tool.name in self.choice.names
            )
        self._parallel = parallel
        self.reasoning: ReasoningFormat | None = reasoning_format(config.reasoning_parser, self._template)
        self._opened = self.reasoning.opened(rendered) if self.reasoning is not None else None
        texts = (self._form.markers if self._form else ()) + (
            self.reasoning.markers if self.reasoning else ()
        )
        ids = {text: renderer.tokenizer.token_to_id(text) for text in texts}
        self._markers: dict[str, int] = {text: token for text, token in ids.items() if token is not None}
        self.shown = frozenset(self._markers.values())  # tokens that the parser has to see

    @property
    def active(self) -> bool:
        """Whether answers are more than content."""
        return self._form is not None or self.reasoning is not None

    def refuse_form(self, where: str) -> None:
        """Raise ``InvalidRequest`` where a call is required, beside ``where``, a field that says the answer's
        form.
        """
        if self.choice.mode == "required":
            raise InvalidRequest(
                f"{where} says the form of an answer, and tool_choice asks for a call: leave one of them out",
                param=where,
            )

    def parser(self) -> OutputParser:
        """For one answer."""
        schemas = {tool.name: tool.schema for tool in self.tools}
        return OutputParser(self._form, self.reasoning, schemas=schemas, reasoning_open=self._opened)

    def grammar(self, answer: str | None) -> str | None:
        """The Lark of what answers are held to for the sake of their calls, if anything; with ``answer``, the
        field that says the form of the answer, the rule ``@answer`` may come in place of calls that are not
        required. Raises ``InvalidRequest``.
        """
        if self._form is None:
            return None
        required = self.choice.mode == "required"
        held = required or not self._parallel or self.choice.names is not None
        if not held and answer is None and not any(tool.strict for tool in self.tools):
            return None
        try:
            return tool_grammar(
                self._form,
                self.tools,
                required=required,
                parallel=self._parallel,
                markers=self._markers,
                template=self._template,
                reasoning=self.reasoning,
                reasoning_open=self._opened,
                answer=answer is not None and not required,
            )
        except Unsupported as error:
            where = answer if error.where == ANSWER and answer is not None else error.where
            raise InvalidRequest(f"{where}: {error.message}", param=where) from error

    def after_reasoning(self, grammar: str) -> str:
        """A grammar of the whole output, of that of the answer."""
        if self.reasoning is None or self._opened is False:
            return grammar
        return reasoning_first(grammar, self.reasoning, self._opened, self._markers)
