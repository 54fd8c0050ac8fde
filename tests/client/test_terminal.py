"""`octavo chat` and `octavo complete`, in a terminal and in pipes, against a scripted endpoint."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from client.fake_endpoint import DONE, ROLE, STOP, Body, Fake, event, refused, text, usage
from client.terminal import Terminal


async def said(*parts: str, cached: int = 0) -> AsyncIterator[bytes]:
    yield ROLE
    for part in parts:
        yield event(text(part))
    yield STOP + event(usage=usage(12, len(parts), cached)) + DONE


async def endless() -> AsyncIterator[bytes]:
    yield ROLE + event(text("for ever"))
    await asyncio.sleep(1000)


def messages(fake: Fake) -> list[tuple[str, str]]:
    return [(one["role"], one["content"]) for one in fake.bodies[-1][1]["messages"]]


def test_a_conversation_streams_keeps_what_was_said_and_lives_through_ctrl_c() -> None:
    def answer(body: Body, number: int):
        return [said("Hel", "lo!"), endless(), said("third", cached=8), said("fresh")][number]

    flags = ["--system=be kind", "--temperature=0.5", "--stop=END", '--extra-body={"top_logprobs": 1}']
    with Fake(answer).on_a_thread() as fake, Terminal("chat", f"--url={fake.url}", *flags) as chat:
        chat.wait_for("first at http://")
        chat.type("hi\n")
        chat.wait_for("Hello!")
        assert messages(fake) == [("system", "be kind"), ("user", "hi")]
        path, body = fake.bodies[-1]
        assert path == "/v1/chat/completions"
        assert (body["temperature"], body["stop"], body["top_logprobs"]) == (0.5, ["END"], 1)
        chat.type("go on\n")
        chat.wait_for("for ever")
        chat.type("\x03")
        chat.wait_for("(stopped)")
        chat.type("/stats\n")
        chat.wait_for("figures after each answer")
        chat.type("and now?\n")
        chat.wait_for("prompt 12 tokens, 8 of them cached; answer 1 tokens")
        assert messages(fake)[3:] == [("user", "go on"), ("assistant", "for ever"), ("user", "and now?")]
        chat.type("/reset\n")
        chat.type("again\n")
        chat.wait_for("fresh")
        assert messages(fake) == [("system", "be kind"), ("user", "again")]
        chat.type("/exit\n")
        assert chat.end() == 0


def test_an_error_is_one_line_and_the_conversation_goes_on() -> None:
    def answer(body: Body, number: int):
        return [refused(429, "too busy"), said("fine"), said("Salve")][number]

    with Fake(answer).on_a_thread() as fake, Terminal("chat", f"--url={fake.url}", "--model=mine") as chat:
        chat.type("one\n")
        chat.wait_for("octavo: status 429: too busy")
        chat.type("two\n")
        chat.wait_for("fine")
        assert (fake.bodies[-1][1]["model"], messages(fake)) == ("mine", [("user", "two")])
        chat.type("/sistem\n")
        chat.wait_for("/sistem is unknown")
        chat.type("/system speak Latin\n")
        chat.type("three\n")
        chat.wait_for("Salve")
        chat.wait_for("> ")
        assert messages(fake) == [("system", "speak Latin"), ("user", "three")]
        chat.press("\x03", "leaves")
        chat.wait_for("> ")
        chat.type("\x04")
        assert chat.end() == 0


def test_a_terminal_shows_what_a_model_writes_and_obeys_none_of_it() -> None:
    fake = Fake(lambda *_: said("a\x1b[2Jb", "c\x07"))
    with fake.on_a_thread(), Terminal("complete", "x", f"--url={fake.url}") as shown:
        assert shown.end() == 0
    assert shown.screen == "a\\x1b[2Jbc\\x07\r\n"


def octavo(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cli", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)


def test_complete_reads_a_pipe_and_writes_the_text_alone() -> None:
    async def answer(body: Body, number: int) -> AsyncIterator[bytes]:
        yield event({"index": 0, "text": " there", "finish_reason": None})
        yield event({"index": 0, "text": "\x1b!", "finish_reason": "length"}, usage=usage(2, 2)) + DONE

    with Fake(answer).on_a_thread() as fake:
        done = octavo("complete", f"--url={fake.url}", "--stats", "--max-tokens=2", stdin="Hello")
    assert (done.returncode, done.stdout) == (0, " there\x1b!\n")
    assert "prompt 2 tokens, 0 of them cached; answer 2 tokens" in done.stderr
    path, body = fake.bodies[0]
    assert (path, body["prompt"], body["max_tokens"], body["model"]) == (
        "/v1/completions",
        "Hello",
        2,
        "first",
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda *_: refused(401, "no such key"), "octavo: status 401: no such key\n"),
        (lambda *_: cut(), "octavo: the stream ended before its end\n"),
    ],
)
def test_complete_fails_in_one_line(answer, message: str) -> None:
    with Fake(answer).on_a_thread() as fake:
        done = octavo("complete", "Hello", f"--url={fake.url}")
    assert (done.returncode, done.stderr) == (1, message)


async def cut() -> AsyncIterator[bytes]:
    yield event(text("half"))


def test_nobody_there_is_one_line() -> None:
    done = octavo("complete", "Hello", "--url=http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("octavo: http://127.0.0.1:9/v1/models cannot be reached")


def test_reasoning_is_no_part_of_an_answer_in_a_pipe() -> None:
    async def answer(body: Body, number: int) -> AsyncIterator[bytes]:
        yield event(text("", delta={"reasoning": "hm, "})) + event(text("yes")) + STOP + DONE

    with Fake(answer).on_a_thread() as fake:
        done = octavo("chat", f"--url={fake.url}", stdin="well?\n")
    assert (done.returncode, done.stdout) == (0, "yes\n")
