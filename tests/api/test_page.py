"""The page at ``/`` in a real browser: on the real server, and on one whose answers are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from aiohttp import web
from api.browser import chromium
from client.fake_endpoint import DONE, ROLE, STOP, Body, Fake, event, refused, text, usage
from playwright.sync_api import Browser, Page, expect

from octavo.api.page import HEADERS, PAGE

TIMEOUT_MS = 60_000  # of one expectation, on a machine that does other things too


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=TIMEOUT_MS)
    with chromium() as running:
        yield running


class Opened:
    """A page, and what its console said."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.console = page, []
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", lambda message: self.console.append(message.text))
        page.on("pageerror", lambda error: self.console.append(str(error)))
        page.goto(url)

    def ask(self, question: str) -> None:
        """Sends it once the answer before has ended: until then Enter sends nothing."""
        expect(self.page.get_by_role("button", name="Send")).to_be_enabled()
        self.page.get_by_label("Your message").fill(question)
        self.page.keyboard.press("Enter")

    def answer(self, number: int = -1) -> Any:
        return self.page.locator("li.assistant").nth(number)


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Opened]]:
    contexts = []

    def start(url: str, **options: Any) -> Opened:
        contexts.append(browser.new_context(**options))
        return Opened(contexts[-1].new_page(), url)

    yield start
    for context in contexts:
        context.close()


class WithPage(Fake):
    """The scripted endpoint, which serves the page too."""

    async def _models_route(self, request: web.Request) -> web.Response:
        if request.path == "/":
            return web.Response(text=PAGE, content_type="text/html", headers=HEADERS)
        return await super()._models_route(request)

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        app.router.add_get("/", self._models_route)


@pytest.fixture
def scripted() -> Iterator[Callable[..., WithPage]]:
    with contextlib.ExitStack() as stack:
        yield lambda answer: stack.enter_context(WithPage(answer).on_a_thread())


async def said(*parts: str, cached: int = 0) -> AsyncIterator[bytes]:
    yield ROLE
    for part in parts:
        yield event(text(part))
        await asyncio.sleep(0.01)
    yield STOP + event(usage=usage(12, len(parts), cached)) + DONE


async def endless(body: Body, number: int) -> AsyncIterator[bytes]:
    yield ROLE + event(text("It goes on. And "))
    while True:
        await asyncio.sleep(0.05)
        yield event(text("on "))


def test_a_conversation_with_the_real_server(fast: Any, opened: Callable[..., Opened]) -> None:
    page = opened(fast.url)
    expect(page.page.get_by_label("Model")).to_have_value("tiny")
    page.page.get_by_text("Settings").click()
    page.page.get_by_label("Temperature").fill("0")
    page.page.get_by_label("Max tokens").fill("40")
    page.page.get_by_label("System prompt").fill("the quick brown fox jumps over the lazy dog " * 3)
    page.ask("hello world, one two three four five six")
    expect(page.answer().locator(".figures")).to_contain_text(
        re.compile(r"\d+ prompt tokens, \d+ of them cached")
    )
    page.ask("again and again and again")
    figures = page.answer(1).locator(".figures")
    expect(figures).to_contain_text(re.compile(r"[1-9]\d* of them cached; \d+ tokens"))
    assert page.page.locator("li").count() == 4
    assert page.console == []


def test_a_key_is_asked_for_and_used(serve: Any, opened: Callable[..., Opened]) -> None:
    with serve("fast", api_key=("secret",)) as running:
        response = running.get("/")
        assert (
            response.status_code == 200
            and "default-src 'none'" in response.headers["content-security-policy"]
        )
        assert running.get("/page").status_code == running.get("/v1/models").status_code == 401
        page = opened(running.url)
        expect(page.page.get_by_role("alert")).to_contain_text("401: an API key is needed")
        expect(page.page.get_by_label("API key")).to_be_focused()
        page.page.get_by_label("API key").fill("secret")
        page.page.keyboard.press("Enter")
        expect(page.page.get_by_label("Model")).to_have_value("tiny")
        page.ask("hello")
        expect(page.answer().locator(".figures")).to_contain_text("prompt tokens")


def test_tokens_show_as_they_come_and_escape_stops(scripted: Any, opened: Callable[..., Opened]) -> None:
    fake = scripted(endless)
    page = opened(fake.url)
    page.ask("go on")
    expect(page.answer()).to_contain_text("on on on")
    expect(page.answer()).to_have_attribute("aria-busy", "true")
    expect(page.page.get_by_role("button", name="Send")).to_be_disabled()
    page.page.keyboard.press("Escape")
    expect(page.answer()).to_contain_text("Stopped.")
    expect(page.page.get_by_role("button", name="Stop")).to_be_hidden()
    assert fake.gone.wait(60)  # the request ended at the server too
    page.ask("and now?")
    expect(page.answer(1)).to_contain_text("on on")
    roles = [one["role"] for one in fake.bodies[-1][1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    page.page.get_by_role("button", name="Stop").click()
    expect(page.answer(1)).to_contain_text("Stopped.")
    expect(page.page.get_by_label("Your message")).to_be_focused()


def test_what_a_model_writes_is_text(scripted: Any, opened: Callable[..., Opened]) -> None:
    evil = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    page = opened(scripted(lambda *_: said(evil, " end")).url)
    page.ask("<b>hi</b>")
    expect(page.answer()).to_contain_text(f"{evil} end")
    expect(page.page.locator("li.user")).to_contain_text("<b>hi</b>")
    assert page.page.locator("li img, li script, li b").count() == 0
    assert page.page.title() == "Octavo chat"


def test_nothing_but_the_pages_own_script_runs_and_nobody_else_is_called(
    scripted: Any, opened: Callable[..., Opened]
) -> None:
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    assert re.findall(r"(?:src|href)=\"(?!data:,\")", PAGE) == []
    page = opened(scripted(lambda *_: said("x")).url)
    ran = page.page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
        " document.head.append(s); return window.ran ?? 0 }"
    )
    assert ran == 0
    left = page.page.evaluate("() => fetch('http://127.0.0.1:9/').then(() => 'sent', (e) => e.name)")
    assert left == "TypeError"
    assert sum("Content Security Policy" in line for line in page.console) >= 2


def test_a_screen_reader_hears_whole_sentences(scripted: Any, opened: Callable[..., Opened]) -> None:
    page = opened(scripted(lambda *_: said("One", ". Two ", "is lon", "ger! Thr", "ee")).url)
    page.ask("count")
    expect(page.answer().locator(".figures")).to_be_visible()
    live = page.page.locator("[aria-live=polite]")
    assert live.locator("p").all_text_contents()[:3] == ["One.", "Two is longer!", "Three"]
    expect(live).to_contain_text("12 prompt tokens, 0 of them cached; 5 tokens")
    assert page.page.locator("#log").get_attribute("aria-live") is None
    unnamed = page.page.evaluate(
        "() => [...document.querySelectorAll('input, select, textarea')]"
        ".filter((e) => !e.labels.length).length"
    )
    assert unnamed == 0


def test_it_works_with_the_keyboard_alone(scripted: Any, opened: Callable[..., Opened]) -> None:
    fake = scripted(lambda *_: said("fine"))
    page = opened(fake.url)
    keyboard = page.page.keyboard
    expect(page.page.get_by_label("Your message")).to_be_focused()
    keyboard.type("one")
    keyboard.press("Shift+Enter")
    keyboard.type("two")
    keyboard.press("Enter")
    expect(page.answer()).to_contain_text("fine")
    assert fake.bodies[-1][1]["messages"] == [{"role": "user", "content": "one\ntwo"}]
    seen = []
    for _ in range(8):
        keyboard.press("Shift+Tab")
        seen.append(
            page.page.evaluate(
                "() => [document.activeElement.id || document.activeElement.tagName,"
                " getComputedStyle(document.activeElement).outlineStyle]"
            )
        )
    assert {"model", "fresh", "SUMMARY", "MAIN"} <= {name for name, _ in seen}
    assert {style for name, style in seen if name != "BODY"} == {"solid"}


def test_parameters_go_out_and_wrong_ones_do_not(scripted: Any, opened: Callable[..., Opened]) -> None:
    fake = scripted(lambda *_: said("fine"))
    page = opened(fake.url)
    page.page.get_by_text("Settings").click()
    for label, value in (
        ("Temperature", "0.5"),
        ("Top p", "0.9"),
        ("Max tokens", "7"),
        ("System prompt", "short"),
    ):
        page.page.get_by_label(label).fill(value)
    page.page.get_by_label("Model").select_option("second")
    page.ask("hi")
    expect(page.answer()).to_contain_text("fine")
    sent = fake.bodies[-1][1]
    assert (sent["model"], sent["temperature"], sent["top_p"], sent["max_tokens"]) == ("second", 0.5, 0.9, 7)
    assert sent["messages"][0] == {"role": "system", "content": "short"}
    page.page.get_by_label("Temperature").fill("5")
    page.ask("again")
    expect(page.page.get_by_label("Temperature")).to_be_focused()
    assert len(fake.bodies) == 1


def test_errors_are_shown_and_the_question_can_be_asked_again(
    scripted: Any, opened: Callable[..., Opened]
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield ROLE + b'data: {"error": {"message": "the engine failed"}}\n\n' + DONE

    fake = scripted(lambda body, number: [refused(429, "too busy"), broken(), said("fine")][number])
    page = opened(fake.url)
    page.ask("hi")
    expect(page.page.get_by_role("alert").first).to_have_text("429: too busy")
    expect(page.page.get_by_label("Your message")).to_have_value("hi")
    page.page.keyboard.press("Enter")
    expect(page.page.get_by_role("alert").nth(1)).to_have_text("the engine failed")
    page.page.keyboard.press("Enter")
    expect(page.answer()).to_contain_text("fine")
    assert [one["content"] for one in fake.bodies[-1][1]["messages"]] == ["hi"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_dark_or_light_as_the_system_is_and_text_has_contrast(
    scripted: Any, opened: Callable[..., Opened], scheme: str
) -> None:
    page = opened(scripted(lambda *_: said("fine")).url, color_scheme=scheme)
    page.ask("hi")
    expect(page.answer().locator(".figures")).to_be_visible()

    def colour(selector: str, name: str) -> list[int]:
        value = page.page.locator(selector).first.evaluate(f"(e) => getComputedStyle(e).{name}")
        return [int(part) for part in re.findall(r"\d+", value)[:3]]

    paper = colour("body", "backgroundColor")
    assert (luminance(paper) < 0.1) == (scheme == "dark")
    for selector in ("li.assistant p", ".figures", "li h2", ".hint"):
        assert contrast(colour(selector, "color"), paper) >= 4.5  # WCAG AA
    assert contrast(colour("#send", "color"), colour("#send", "backgroundColor")) >= 4.5


def luminance(colour: list[int]) -> float:
    """WCAG's relative luminance."""
    parts = [c / 255 for c in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[int], other: list[int]) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
