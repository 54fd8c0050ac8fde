"""From the form a client asks for to a grammar in llguidance's own form, checked.

A hostile schema may take minutes to compile, inside native code that nothing interrupts. So it is compiled in
a process of its own that may use ``CPU_S`` seconds for each, and ``MEMORY`` bytes; beyond, it dies, and the
next form gets another one.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from typing import IO, TYPE_CHECKING, Any

from octavo.core.sampling_params import StructuredOutputs
from octavo.errors import InvalidRequest, OctavoError

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_TEXT = 2**17  # characters of a schema, regex or grammar
MAX_LARK = 2**20  # of what we write ourselves, for many tools
CPU_S = 1.0  # what compiling one may take; schemas of real applications take some milliseconds
MEMORY = 2**30  # address space of the process
NICENESS = 3  # the streams' process goes first where both want the same core
COMMAND = ("-m", __name__)
KEPT = 64  # compiled forms that are remembered
MAX_LEXER_STATES = 50_000  # of 1 to 2 kB each: what one grammar may come to hold
WHITESPACE = r"[ \n\r\t]{1,40}"  # between the parts of JSON: a small model would go on with it for ever


class GivenUp(Exception):
    """Nobody waits for the grammar any more."""


class GrammarCompiler:
    """Compiles forms, one at a time. Its process starts with the first one. Thread safe.

    Whoever may stop waiting passes an event ``left``, to be given to ``give_up`` then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, str] = OrderedDict()
        self._process: subprocess.Popen[str] | None = None
        self._left: threading.Event | None = None  # of the compilation that the process is busy with
        self._process_lock = threading.Lock()  # of these two; held for moments only

    def compile(
        self,
        forms: StructuredOutputs,
        where: str = "structured_outputs",
        left: threading.Event | None = None,
    ) -> str:
        """The grammar of ``forms``; ``where`` is the field of the request, or the part of one, that holds it.

        Raises ``InvalidRequest`` naming the part that cannot be held to, and ``GivenUp``.
        """
        form, value = _form(forms)
        place = f"{where}.{form}" if where == "structured_outputs" else where
        return self._compile(form, value, place, where, left)

    def compile_lark(self, lark: str, where: str, left: threading.Event | None = None) -> str:
        """The grammar of a text of llguidance's own kind of Lark, made of what the field ``where`` holds."""
        return self._compile("lark", lark, where, where, left)

    def give_up(self, left: threading.Event) -> None:
        """End the compilation that was begun with ``left``, at whatever point it is."""
        with self._process_lock:
            left.set()
            if self._left is left and self._process is not None:
                self._process.kill()

    def _compile(self, form: str, value: Any, place: str, where: str, left: threading.Event | None) -> str:
        request = json.dumps({"form": form, "value": value})
        longest = MAX_LARK if form == "lark" else MAX_TEXT
        if len(request) > longest:
            raise InvalidRequest(
                f"{place} is {len(request)} characters long: at most {longest}", param=_field(where)
            )
        with self._lock:
            grammar = self._known.get(request) or self._ask(request, place, where, left)
            self._known[request] = grammar
            self._known.move_to_end(request)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return grammar

    def close(self) -> None:
        """End the process, whatever it compiles."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _begin(self, left: threading.Event | None) -> subprocess.Popen[str]:
        with self._process_lock:
            if left is not None and left.is_set():
                raise GivenUp
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, *COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            self._left = left
            return self._process

    def _ask(self, request: str, place: str, where: str, left: threading.Event | None) -> str:
        process = self._begin(left)
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        with self._process_lock:
            self._left, given_up = None, left is not None and left.is_set()
        if given_up or not line:
            self._process = None
            process.communicate()
            if given_up:
                raise GivenUp
            if process.returncode >= 0:  # a fault of its own: what it wrote says which
                raise OctavoError(f"the process that compiles {place} has failed")
            slow = process.returncode == -signal.SIGPROF
            took = f"{CPU_S:g} s of computing" if slow else f"{MEMORY >> 20} MiB of memory"
            raise InvalidRequest(
                f"{place} needs more than {took} to compile: make it simpler", param=_field(where)
            )
        answer = json.loads(line)
        if "error" in answer:
            raise InvalidRequest(f"{place}{answer['at']}: {answer['error']}", param=_field(where))
        grammar: str = answer["grammar"]
        return grammar


def _form(forms: StructuredOutputs) -> tuple[str, Any]:
    for form in ("json", "regex", "choice", "grammar"):
        if (value := getattr(forms, form)) is not None:
            return form, value
    return "json_object", True


def _field(where: str) -> str:
    return where.partition(".")[0]


def limits() -> LLParserLimits:
    """What building a grammar and a step through it may cost; beside these, llguidance's own."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


# What the process does

_ONE_OF = (
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    "oneOf is supported only where the types of its branches differ: use anyOf",
)


def main() -> None:
    """Answer one line for each line of standard input, until it ends."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import llguidance  # noqa: F401  # here, so that no form is charged for it

    serve(sys.stdin, sys.stdout)


def serve(requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
        answer = _answer(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from llguidance import LLMatcher

    form, value = request["form"], request["value"]
    try:
        if form in ("json", "json_object"):
            value = _schema(value) if form == "json" else {"type": "object"}
        grammar = _grammar(form, value)
    except (ValueError, RecursionError) as error:
        return {"error": _line(str(error)), "at": ""}
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    # A warning is of something that it would pass over; our own grammars have nothing but what is meant so.
    if failed or (messages and form != "lark"):
        said = messages[0].replace(_ONE_OF[0], _ONE_OF[1])
        if form == "lark":  # the place, and the lines after the first, are of our own text
            said = re.sub(r"^at \d+\(\d+\): ", "", said).partition("\n")[0]
        message = _line(said)
        return {"error": message, "at": _place(value, message) if form == "json" else ""}
    return {"grammar": grammar}


def _schema(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(value, (dict, bool)):
        raise ValueError("a JSON schema is an object")
    return value


def _grammar(form: str, value: Any) -> str:
    from llguidance import LLMatcher, regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    match form:
        case "lark":
            grammar = LLMatcher.grammar_from_lark(value)
        case "regex":
            ascii_classes = "dw"  # of \\d and \\w, as JSON Schema and JavaScript have them
            grammar = LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(value, ascii_classes)}/")
        case "choice":
            choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in value)
            grammar = LLMatcher.grammar_from_lark(f"start: {choices}")
        case "grammar":
            try:
                lark = any_to_lark(value)
            except Exception as error:  # the converter raises plain Exception
                raise ValueError(f"neither GBNF nor Lark: {error}") from error
            grammar = LLMatcher.grammar_from_lark(lark)
        case _:
            grammar = LLMatcher.grammar_from_json_schema(
                json.dumps(value),
                overrides={"lenient": False, "coerce_one_of": False, "whitespace_pattern": WHITESPACE},
            )
    text: str = grammar
    return text


def _place(schema: Any, message: str) -> str:
    """Where in a schema the message's pattern, format or keyword is, as ``.properties.name.pattern``."""
    if isinstance(schema, list):
        parts: list[tuple[str, Any]] = [(f"[{index}]", part) for index, part in enumerate(schema)]
    elif isinstance(schema, dict):
        parts = [(f".{key}", part) for key, part in schema.items()]
        for key, part in schema.items():
            spoken_of = key in ("pattern", "format") and isinstance(part, str) and part in message
            if spoken_of or f'"{key}"' in message or message.startswith(f"{key} "):
                return f".{key}"
    else:
        return ""
    for step, part in parts:
        if place := _place(part, message):
            return step + place
    return ""


def _line(message: str) -> str:
    return " ".join(message.split())[:500]


if __name__ == "__main__":
    main()
