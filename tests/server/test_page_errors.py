"""The chat page when things go wrong: it says what happened, and what to do about it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.page_browser import answer_text, ask, chromium, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

    from tests.server.conftest import RunningServer

SENT = "Failed to load resource"  # the browser's own line for every status of 400 and more


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    with opened(browser, server.url, expects=SENT) as shown:
        yield shown


def send(page: Page, text: str) -> str:
    """Send a message that fails; returns what the page says."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    return str(page.get_by_role("alert").inner_text())


def test_a_refusal_is_shown_in_the_server_s_words(page: Page) -> None:
    told = send(page, '[[{"refuse": "the prompt <b>is</b> odd"}]]text')
    assert told.startswith("The server refused the request\n")
    assert "the prompt <b>is</b> odd (field: prompt)" in told


def test_a_conversation_that_is_too_long(page: Page) -> None:
    told = send(page, "[[{}]]" + 3000 * "x")
    assert told.startswith("The conversation is too long\n")
    assert "Start a new chat" in told


def test_an_answer_that_breaks_off_keeps_its_text_and_can_be_tried_again(page: Page) -> None:
    told = send(page, '[[{"die": "request", "die_after": 3, "delay_s": 0.1}]]Hello')
    assert told.startswith("The server failed\n")
    assert answer_text(page).startswith("H")
    ask(page, "[[{}]]next")
    assert answer_text(page) == "next"
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("alert").wait_for()


@pytest.mark.parametrize(
    ("status", "headers", "title", "hint"),
    [
        (429, {"Retry-After": "7"}, "Too many requests", "Try again in 7 s."),
        (503, {}, "Not right now", "Try again soon."),
        (500, {}, "The server failed", "a reason"),
    ],
)
def test_statuses_become_sentences(
    page: Page, status: int, headers: dict[str, str], title: str, hint: str
) -> None:
    body = json.dumps({"error": {"message": "a reason", "code": None, "param": None, "type": "x"}})
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=status, headers=headers, body=body),
    )
    told = send(page, "hi")
    assert told.startswith(f"{title}\n")
    assert hint in told
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Try again").click()
    page.locator(".facts").wait_for()


def test_a_stream_without_an_end_is_not_taken_for_an_answer(page: Page) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "half"}, "finish_reason": None}]}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream",
            body=f": ping\r\n\r\ndata: {json.dumps(chunk)}\r\n\r\n",
        ),
    )
    assert send(page, "hi").startswith("The connection was lost\n")
    assert answer_text(page) == "half"


def test_a_server_that_is_gone(browser: Browser, own_server: Callable[..., RunningServer]) -> None:
    server = own_server()
    server.wait_ready()
    with opened(browser, server.url, expects=SENT) as page:
        ask(page, "[[{}]]first")
        server.end(signal.SIGKILL)
        assert send(page, "[[{}]]second").startswith("The server does not answer\n")
        assert answer_text(page, 0) == "first"


def test_a_loading_model_is_waited_for(page: Page) -> None:
    loading = [True]

    def answer(route: Route) -> None:
        error = {"message": "the model is loading", "code": "overloaded"}
        if loading[0]:
            route.fulfill(status=503, body=json.dumps({"error": error}))
        else:
            route.continue_()

    page.route("**/v1/models", answer)
    page.reload()
    page.locator("#model", has_text="loading").wait_for()
    loading[0] = False
    page.locator("#model", has_text="toy").wait_for()


def require_key(page: Page, key: str) -> None:
    """Refuse requests of the page's scripts that do not bring the key."""

    def answer(route: Route) -> None:
        if route.request.headers.get("authorization") == f"Bearer {key}":
            route.continue_()
        else:
            error = {"message": "a key is needed", "code": "invalid_api_key"}
            route.fulfill(status=401, body=json.dumps({"error": error}))

    page.route("**/v1/**", answer)


def test_a_key_is_asked_for_kept_in_the_tab_and_sent(page: Page) -> None:
    require_key(page, "secret")
    page.reload()
    page.get_by_role("alert").get_by_text("This server answers only with an API key.").wait_for()
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Use this key").click()
    page.get_by_text("The key was not accepted").wait_for()
    page.get_by_label("API key").fill("secret")
    page.keyboard.press("Enter")
    page.locator("#model", has_text="toy").wait_for()
    ask(page, "[[{}]]let in")
    assert answer_text(page) == "let in"
    stored: Any = page.evaluate("[JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
    assert "secret" not in stored[0]
    assert "secret" in stored[1]


def test_a_server_with_keys_lets_a_browser_in(
    browser: Browser, own_server: Callable[..., RunningServer]
) -> None:
    """The browser asks for the key when the page is opened, and sends it with each request."""
    server = own_server(api_keys=("secret",))
    server.wait_ready()
    assert server.get("/").status == 401
    credentials = {"username": "any", "password": "secret"}
    with opened(browser, server.url, expects=SENT, http_credentials=credentials) as page:
        ask(page, "[[{}]]let in")
        assert answer_text(page) == "let in"
        page.goto(f"{server.url}/dashboard")
        page.locator("#state", has_text="live").wait_for()
