"""How the page looks and is reached: sources, narrow screens, dark mode, keys, screen readers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.page_browser import answer_text, ask, chromium, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.server.conftest import RunningServer

LONG = '[[{"burst": 3}]]' + "a sentence of some words, then https://example.invalid/" + "x" * 90
DRAFTERS = ("prediction", "suffix", "ngram", "medusa", "small-model", "one", "two", "three")

# Every element with text of its own: its least contrast, background colours laid over each other.
CONTRASTS = """() => {
  const parse = (css) => {
    const [r, g, b, a = 1] = css.match(/[\\d.]+/g).map(Number);
    return { rgb: [r, g, b], a };
  };
  const over = (top, under) => top.rgb.map((v, i) => v * top.a + under[i] * (1 - top.a));
  const ground = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reduceRight((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const look = (node, text, style) => {
    const under = ground(node);
    const [low, high] = [light(under), light(over(parse(style.color), under))].sort((a, b) => a - b);
    found.push([(high + 0.05) / (low + 0.05), `${node.className || node.tagName}: ${text.slice(0, 30)}`]);
  };
  for (const node of document.body.querySelectorAll("*")) {
    if (!node.checkVisibility()) continue;
    const text = [...node.childNodes].filter((c) => c.nodeType === 3).map((c) => c.data).join("").trim();
    if (text && !(node instanceof SVGElement)) look(node, text, getComputedStyle(node));
    if (node.placeholder) look(node, node.placeholder, getComputedStyle(node, "::placeholder"));
  }
  return found;
}"""  # noqa: E501  # JavaScript

STYLES = """nodes => nodes.map((node) => {
  const ink = getComputedStyle(node.querySelector(".ink"));
  const line = ink.textDecorationStyle + ink.textDecorationThickness;
  return [node.dataset.source, ink.color, ink.textDecorationLine, line];
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    with opened(browser, server.url) as shown:
        yield shown


def chunk(**choice: object) -> str:
    whole = {"index": 0, "delta": {}, "finish_reason": None, **choice}
    return f"data: {json.dumps({'choices': [whole]})}\n\n"


def can(page: Page, *chunks: str) -> None:
    """Answer the page's requests with these chunks, as a server of many drafters would."""
    body = "".join(chunks) + chunk(finish_reason="stop") + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )


def token(text: str, sources: Sequence[str], step: int, depth: int = 1) -> dict[str, Any]:
    kind = "bonus" if sources == ["target"] else "accepted"
    return {
        "id": 7, "text": text, "sources": sources, "kind": kind, "depth": depth, "step": step
    }  # fmt: skip


def rainbow() -> list[str]:
    """An answer with a token of each drafter, of the target, and a rejected draft per step."""
    chunks = []
    for step, name in enumerate(DRAFTERS):
        infos = [token(f" {name}", [name], step), token(" own", ["target"], step, 2)]
        wrong = [{"step": step, "depth": 2, "id": 9, "text": f" not{step}", "sources": [name]}]
        chunks.append(
            chunk(delta={"content": f" {name} own"}, token_info=infos, rejected_drafts=wrong)
        )
    return chunks


def test_tokens_are_coloured_and_underlined_by_source(page: Page) -> None:
    ask(page, '[[{"burst": 2}]]Hello')
    looks = page.locator(".token:not(.unseen)").evaluate_all(STYLES)
    assert [look[0] for look in looks] == ["script", "target", "script", "target", "script"]
    assert {look[2] for look in looks} == {"underline"}
    assert len({tuple(look) for look in looks}) == 2
    assert page.locator("#legend li").all_inner_texts() == ["abc\nscript", "abc\ntarget (bonus)"]


def test_no_two_sources_look_alike_with_colour_or_without(page: Page) -> None:
    can(page, *rainbow())
    ask(page, "all of them")
    looks = page.locator(".token").evaluate_all(STYLES)
    by_source = {source: (colour, line) for source, colour, _, line in looks}
    assert set(by_source) == {*DRAFTERS, "target"}
    assert len({colour for colour, _ in by_source.values()}) == len(by_source)
    assert len({line for _, line in by_source.values()}) == len(by_source)


def test_colours_can_be_turned_off(page: Page) -> None:
    ask(page, '[[{"burst": 2}]]Hello')
    page.get_by_role("button", name="Colours").click()
    looks = page.locator(".token").evaluate_all(STYLES)
    assert {underlined for _, _, underlined, _ in looks} == {"none"}


def test_a_token_says_what_it_is(page: Page) -> None:
    ask(page, '[[{"burst": 2}]]Hello')
    page.locator(".token").nth(2).hover()
    note = page.get_by_role("tooltip")
    assert note.inner_text().splitlines()[:2] == ["script", "accepted draft"]
    assert "depth 1 · step 1" in note.inner_text()
    page.locator(".token").nth(3).hover()
    assert "bonus token" in note.inner_text()
    page.mouse.move(0, 0)
    note.wait_for(state="hidden")


def test_rejected_drafts_and_steps_are_shown_on_demand(page: Page) -> None:
    can(page, *rainbow())
    ask(page, "all of them")
    assert not page.locator(".rejected").first.is_visible()
    assert not page.locator(".ruler").is_visible()
    page.get_by_role("button", name="Rejected drafts").click()
    page.get_by_role("button", name="Steps").click()
    assert page.locator(".draft").all_inner_texts() == [f"not{k}" for k in range(len(DRAFTERS))]
    after = page.locator(".rejected").first.evaluate("node => node.previousSibling.textContent")
    assert after == " own"
    page.locator(".draft").first.hover()
    assert "rejected draft" in page.get_by_role("tooltip").inner_text()
    assert page.locator(".token.begins").count() == len(DRAFTERS)
    ruler = page.get_by_role("img", name="8 steps, at most 2 tokens in one")
    assert ruler.locator(".step").count() == len(DRAFTERS)
    assert ruler.locator(".cell.hollow").count() == len(DRAFTERS)
    assert answer_text(page) == "".join(f" {name} own" for name in DRAFTERS)


def test_halves_of_characters_hidden_tokens_and_lost_spaces(page: Page) -> None:
    infos = [
        token("Hi", ["target"], 0),
        token("\ufffd", ["suffix"], 1),
        token("\ufffd", ["suffix"], 1, 2),
        token("there", ["target"], 1, 3),
        token("<|end|>", ["target"], 2),
    ]
    can(
        page,
        chunk(delta={"content": "Hi"}, token_info=infos[:2]),
        chunk(delta={"content": "é there"}, token_info=infos[2:]),
    )
    ask(page, "odd tokens")
    assert answer_text(page) == "Hié there"
    shown = page.locator(".token").all_text_contents()
    assert shown == ["Hi", "é", "", " there", "<|end|>"]
    assert page.locator(".token.unseen").all_text_contents() == ["<|end|>"]


def test_a_token_that_is_markup_is_shown_as_it_is(page: Page) -> None:
    markup = "<img src=x onerror=alert(1)>"
    wrong = [{"step": 0, "depth": 1, "id": 9, "text": markup, "sources": [markup]}]
    infos = [token(markup, [markup], 0)]
    can(page, chunk(delta={"content": markup}, token_info=infos, rejected_drafts=wrong))
    ask(page, markup)
    page.get_by_role("button", name="Rejected drafts").click()
    page.locator(".token").hover()
    page.get_by_role("button", name="Same seed").click()
    page.locator(".comparison.same").wait_for()
    assert answer_text(page) == page.locator(".question .text").inner_text() == markup
    assert page.locator("main img, #token-note img, #legend img").count() == 0


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_a_narrow_screen_does_not_scroll_sideways(
    browser: Browser, server: RunningServer, path: str
) -> None:
    with opened(
        browser, server.url + path, viewport={"width": 360, "height": 640}, has_touch=True
    ) as page:
        if path == "/":
            ask(page, LONG)
            page.get_by_role("button", name="Rejected drafts").click()
            page.get_by_role("button", name="Steps").click()
            page.get_by_role("button", name="Same seed").click()
            page.locator(".comparison.same").wait_for()
            page.get_by_role("button", name="Settings").click()
        else:
            page.locator("#decisions td").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate("document.body.scrollWidth") <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read(browser: Browser, server: RunningServer, scheme: Any) -> None:
    """Text has a contrast of 4.5 to its background, WCAG's AA: tokens, notes, errors, all."""
    with opened(browser, server.url, expects="503", color_scheme=scheme) as page:
        contrasts = page.evaluate(CONTRASTS)
        can(page, *rainbow())
        ask(page, "all of them")
        for name in ("Rejected drafts", "Steps", "Settings"):
            page.get_by_role("button", name=name).click()
        page.get_by_role("button", name="Same seed").click()
        page.locator(".comparison.same").wait_for()
        page.locator(".comparison .token").first.evaluate("node => node.classList.add('differs')")
        page.locator(".draft").first.hover()
        page.unroute("**/v1/chat/completions")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, body="{}"))
        page.get_by_label("Message", exact=True).fill("hi")
        page.keyboard.press("Enter")
        page.locator(".problem").wait_for()
        contrasts += page.evaluate(CONTRASTS)
        page.goto(f"{server.url}/dashboard")
        page.locator("#decisions td").first.wait_for()
        contrasts += page.evaluate(CONTRASTS)
    assert len(contrasts) > 100
    assert [(round(ratio, 2), where) for ratio, where in contrasts if ratio < 4.5] == []


def test_dark_mode_follows_the_system_until_a_person_chooses(
    browser: Browser, server: RunningServer
) -> None:
    def is_dark(page: Page) -> bool:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(",")) < 3 * 60

    with opened(browser, server.url, color_scheme="dark") as page:
        assert is_dark(page)
        page.get_by_role("button", name="Switch between light and dark").click()
        assert not is_dark(page)
        page.goto(f"{server.url}/dashboard")
        assert not is_dark(page)
    with opened(browser, server.url, color_scheme="light") as page:
        assert not is_dark(page)


def test_all_can_be_done_with_keys_alone(page: Page, server: RunningServer) -> None:
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type('[[{"burst": 2}]]one')
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.locator(".answer > .actions").wait_for()
    assert answer_text(page) == "one\ntwo"
    reached = []
    page.evaluate("document.activeElement.blur()")
    for _ in range(30):
        page.keyboard.press("Tab")
        name = page.evaluate(
            "[document.activeElement.tagName, document.activeElement.className,"
            " document.activeElement.textContent.trim() || document.activeElement.name].join(' ')"
        )
        visible = page.evaluate("getComputedStyle(document.activeElement).outlineStyle !== 'none'")
        if not name.startswith("BODY"):
            assert visible, name
        reached.append(name)
        if name.startswith("SPAN token"):
            page.keyboard.press("ArrowRight")
            assert page.get_by_role("tooltip").inner_text().startswith("target")
            page.keyboard.press("End")
            assert page.evaluate("document.activeElement.textContent") == "<|end|>"
            page.keyboard.press("Home")
    wanted = (
        "New chat", "Settings", "Dashboard", "Edit", "SPAN token", "Copy", "Regenerate",
        "Same seed without speculation", "Colours", "Steps", "Rejected drafts", "message", "Send",
    )  # fmt: skip
    assert [name for name in wanted if not any(name in found for found in reached)] == []


def test_settings_open_and_close_with_keys(page: Page) -> None:
    button = page.get_by_role("button", name="Settings")
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    assert page.evaluate("document.activeElement.name") == "system"
    page.keyboard.press("Escape")
    assert button.get_attribute("aria-expanded") == "false"
    assert page.evaluate("document.activeElement.id") == "settings-button"


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_a_screen_reader_finds_its_way(page: Page, server: RunningServer, path: str) -> None:
    page.goto(server.url + path)
    for landmark in ("banner", "main", "navigation"):
        assert page.get_by_role(landmark).count() == 1, landmark
    if path == "/":
        ask(page, '[[{"burst": 2}]]Hello')
        page.get_by_role("button", name="Settings").click()
        assert page.locator("#spoken").get_attribute("aria-live") == "polite"
        assert page.locator("#spoken").inner_text() == "Answer: Hello"
        assert (
            page.locator(".tokens").evaluate("node => node.closest('[aria-live]').ariaLive")
            == "off"
        )
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, a, input, textarea, [role=img], img")]
          .filter((node) => !(node.ariaLabel || node.textContent.trim() || node.labels?.length
            || node.hasAttribute("alt") || node.querySelector("img[alt]")))
          .map((node) => node.outerHTML)"""
    )
    assert nameless == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids))
