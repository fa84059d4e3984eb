"""The chat page in a real browser: what is sent, what is shown, and what can be done with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.page_browser import answer_text, ask, chromium, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

    from tests.server.conftest import RunningServer

SLOW = '[[{"delay_s": 0.05, "end": false}]]and on '


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    with opened(browser, server.url) as shown:
        yield shown


def sent_body(page: Page, act: Callable[[], object]) -> Any:
    """The body of the chat request that an action sends."""
    with page.expect_request("**/v1/chat/completions") as caught:
        act()
    return json.loads(caught.value.post_data or "")


def test_a_message_is_answered_and_the_next_one_knows_it(page: Page) -> None:
    ask(page, '[[{"burst": 3}]]Hello, wörld 😀')
    assert answer_text(page) == "Hello, wörld 😀"
    assert page.locator(".question .text").inner_text() == '[[{"burst": 3}]]Hello, wörld 😀'
    body = sent_body(page, lambda: ask(page, "[[{}]]second"))
    assert [(m["role"], m["content"]) for m in body["messages"]] == [
        ("user", '[[{"burst": 3}]]Hello, wörld 😀'),
        ("assistant", "Hello, wörld 😀"),
        ("user", "[[{}]]second"),
    ]
    assert answer_text(page) == "second"


def test_an_answer_is_shown_while_it_comes(page: Page) -> None:
    page.get_by_label("Message", exact=True).fill(SLOW)
    page.keyboard.press("Enter")
    page.locator(".answer.running .tokens", has_text="and").wait_for()
    assert page.locator(".answer").get_attribute("aria-busy") == "true"
    assert page.locator(".facts").count() == 0
    page.keyboard.press("Escape")
    page.locator(".facts").wait_for()


@pytest.mark.parametrize("by", ["Escape", "button", "new chat"])
def test_stopping_ends_the_work(page: Page, server: RunningServer, by: str) -> None:
    num_aborts = len(server.journal("abort"))
    page.get_by_label("Message", exact=True).fill(SLOW)
    page.keyboard.press("Enter")
    page.locator(".tokens", has_text="and on").wait_for()
    if by == "Escape":
        page.keyboard.press("Escape")
    elif by == "button":
        page.get_by_role("button", name="Stop", exact=True).click()
    else:
        page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Send", exact=True).wait_for()
    server.eventually(lambda: len(server.journal("abort")) == num_aborts + 1)
    if by == "new chat":
        assert page.locator(".turn").count() == 0
        assert page.get_by_role("heading", name="Ask something").is_visible()
    else:
        assert "stopped" in page.locator(".facts").inner_text()
        assert answer_text(page).startswith("and on")


def test_regenerate_asks_again_and_drops_what_followed(page: Page) -> None:
    ask(page, "[[{}]]first")
    ask(page, "[[{}]]second")
    again = page.get_by_role("button", name="Regenerate").first
    body = sent_body(page, again.click)
    page.locator(".answer > .actions").wait_for()
    assert [message["content"] for message in body["messages"]] == ["[[{}]]first"]
    assert page.locator(".turn").count() == 1
    assert answer_text(page) == "first"


def test_an_edited_message_is_sent_again(page: Page) -> None:
    ask(page, "[[{}]]first")
    ask(page, "[[{}]]second")
    page.get_by_role("button", name="Edit").first.click()
    field = page.get_by_label("Edit the message")
    assert field.input_value() == "[[{}]]first"
    field.fill("[[{}]]changed")
    body = sent_body(page, lambda: field.press("Enter"))
    page.locator(".answer > .actions").wait_for()
    assert [message["content"] for message in body["messages"]] == ["[[{}]]changed"]
    assert (page.locator(".turn").count(), answer_text(page)) == (1, "changed")


def test_an_edit_can_be_given_up(page: Page) -> None:
    ask(page, "[[{}]]first")
    page.get_by_role("button", name="Edit").click()
    page.keyboard.press("Escape")
    assert page.locator(".question .text").inner_text() == "[[{}]]first"
    assert page.evaluate("document.activeElement.textContent") == "Edit"


def test_copy_puts_the_answer_into_the_clipboard(browser: Browser, server: RunningServer) -> None:
    with opened(browser, server.url, permissions=["clipboard-read", "clipboard-write"]) as page:
        ask(page, "[[{}]]a  b\n  c")
        page.locator(".answer").get_by_role("button", name="Copy").click()
        page.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == "a  b\n  c"


def test_settings_reach_the_request_and_stay(page: Page, server: RunningServer) -> None:
    page.get_by_role("button", name="Settings").click()
    for label, value in {
        "System message": "Be short.",
        "Temperature": "0.25",
        "Top p": "0.9",
        "Max tokens": "40",
        "Seed": "77",
        "Max nodes": "5",
        "Max depth": "3",
    }.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("suffix").uncheck()
    page.reload()
    page.get_by_label("suffix").wait_for(state="attached")
    body = sent_body(page, lambda: ask(page, "[[{}]]kept"))
    assert body["messages"][0] == {"role": "system", "content": "Be short."}
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.25, 0.9, 40)
    assert body["stream_options"] == {"include_usage": True}
    assert body["token_info"] == {"rejected": True}
    told = server.journal("add")[-1]
    assert told["seed"] == 77
    assert told["speculation"] == {"max_nodes": 5, "max_depth": 3, "drafters": ["prediction"]}


def test_no_drafting_is_a_setting_too(page: Page, server: RunningServer) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Draft ahead").uncheck()
    page.get_by_role("button", name="Close").click()
    ask(page, "[[{}]]plain")
    assert server.journal("add")[-1]["speculation"]["max_nodes"] == 0


def test_without_any_drafter_nothing_is_drafted(page: Page, server: RunningServer) -> None:
    page.get_by_role("button", name="Settings").click()
    names = ["suffix", "prediction"]
    for name in names:
        page.get_by_label(name).uncheck()
    body = sent_body(page, lambda: ask(page, "[[{}]]plain"))
    assert body["speculation"] == {"enabled": False}
    assert server.journal("add")[-1]["speculation"]["max_nodes"] == 0
    for name in names:
        page.get_by_label(name).check()
    body = sent_body(page, lambda: ask(page, "[[{}]]drafted"))
    assert body["speculation"] == {"enabled": True}


def test_a_setting_that_makes_no_sense_is_shown_not_sent(page: Page, server: RunningServer) -> None:
    num_requests = len(server.journal("add"))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("-1")
    page.get_by_role("button", name="Close").click()
    page.get_by_label("Message", exact=True).fill("[[{}]]text")
    page.keyboard.press("Enter")
    assert page.get_by_label("Temperature").is_visible()
    assert page.get_by_label("Message", exact=True).input_value() == "[[{}]]text"
    assert len(server.journal("add")) == num_requests
    page.get_by_role("button", name="Back to defaults").click()
    assert page.get_by_label("Temperature").input_value() == "0.7"


def test_a_seed_is_chosen_and_shown_where_none_was_set(page: Page, server: RunningServer) -> None:
    ask(page, "[[{}]]text")
    seed = re.search(r"seed (\d+) \(chosen here\)", page.locator(".facts").inner_text())
    assert seed
    assert server.journal("add")[-1]["seed"] == int(seed[1])


def test_what_a_model_writes_is_text_never_markup(page: Page) -> None:
    text = "<img src=x onerror=alert(1)><script>alert(2)</script>&lt;b&gt; <a href='javascript:0'>"
    ask(page, f'[[{{"burst": 4}}]]{text}')
    assert answer_text(page) == text
    page.locator(".token").first.hover()
    page.get_by_role("button", name="Same seed without speculation").click()
    page.locator(".comparison.same").wait_for()
    assert page.locator("#log img, #log script, #log a, #log b").count() == 0


def test_the_answer_s_figures(page: Page) -> None:
    ask(page, '[[{"burst": 3}]]Hello')
    figures = page.locator(".facts").inner_text()
    for part in ("tokens/s", "first token", "3.00 tokens/step", "100 % accepted", "6 tokens"):
        assert part in figures
    assert "complete" in figures


def test_the_same_seed_without_speculation_gives_the_same_answer(
    page: Page, server: RunningServer
) -> None:
    ask(page, '[[{"burst": 3}]]Hello')
    page.get_by_role("button", name="Same seed without speculation").click()
    page.locator(".comparison.same").wait_for()
    verdict = page.locator(".verdict").inner_text()
    assert verdict.startswith("Identical, 6 tokens.")
    assert re.search(r"[\d.,]+ tokens/s with speculation, [\d.,]+ without", verdict)
    with_it, without = server.journal("add")[-2:]
    assert with_it["seed"] == without["seed"]
    assert (with_it["speculation"]["max_nodes"], without["speculation"]["max_nodes"]) == (None, 0)


def test_a_difference_is_said_and_shown(page: Page) -> None:
    """It cannot happen here, so a second answer is made up between server and page."""
    ask(page, '[[{"burst": 3}]]Hello')

    def answer_otherwise(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        body["messages"][-1]["content"] = "[[{}]]Help"
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", answer_otherwise)
    page.get_by_role("button", name="Same seed without speculation").click()
    page.locator(".comparison.different").wait_for()
    assert page.locator(".verdict").inner_text().startswith("They differ from token 4 on.")
    assert page.locator(".token.differs").all_inner_texts() == ["l", "p"]


def test_an_answer_without_token_info_is_plain_text(page: Page) -> None:
    def forget(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        del body["token_info"]
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", forget)
    ask(page, '[[{"burst": 3}]]Hello')
    assert (answer_text(page), page.locator(".token").count()) == ("Hello", 0)
    page.get_by_role("button", name="Same seed without speculation").click()
    page.locator(".comparison.same").wait_for()
