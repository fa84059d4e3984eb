"""What each token of an answer shows: parts of characters, hidden tokens, text cut at stops."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.page_browser import answer_text, ask, chromium, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.server.conftest import RunningServer

EMOJI = "😀😀🎉 日本"
SIZES = [len(char.encode()) for char in EMOJI]
ENDS = [end - 1 for end in accumulate(SIZES)]  # of each character, the token that completes it
TEXTS = "nodes => nodes.map((node) => node.textContent)"

# Fit chunks of [text, tokens] and return what each token shows, then what text is left over.
FIT = """async (chunks) => {
  const { Alignment } = await import("/page/alignment.js");
  const alignment = new Alignment();
  const fitted = chunks.flatMap(([text, tokens]) => alignment.push(text, tokens));
  const whole = [...fitted, ...alignment.finish()].map((token) => token.shown);
  return { early: fitted.length, whole, left: alignment.text };
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    with opened(browser, server.url) as shown:
        yield shown


def entry(raw: bytes, text: str | None = None, **more: object) -> dict[str, Any]:
    """A token's entry; `text` where it alone decodes to something else than its bytes say."""
    text = raw.decode(errors="replace") if text is None else text
    known = {"id": 7, "sources": ["suffix"], "kind": "accepted", "depth": 1, "step": 0}
    return {**known, "text": text, "bytes": list(raw), **more}


def entries(text: str) -> list[dict[str, Any]]:
    """A token to each byte."""
    return [entry(bytes([byte])) for byte in text.encode()]


def shown_of(text: str) -> list[str]:
    """What the tokens of `entries` are to show."""
    return [part for char in text for part in [""] * (len(char.encode()) - 1) + [char]]


def fit(page: Page, *chunks: tuple[str, Sequence[dict[str, Any]]]) -> tuple[list[str], int]:
    """What each token shows, and how many were certain before the answer was complete."""
    found = page.evaluate(FIT, [list(chunk) for chunk in chunks])
    assert found["left"] == ""
    return found["whole"], found["early"]


def test_a_character_belongs_to_the_token_that_completes_it(page: Page) -> None:
    run = 13 * "😀" + "日本é\ufffd\ufeffa"
    assert fit(page, (run, entries(run))) == (shown_of(run), len(run.encode()))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_come_in_pieces(page: Page, size: int) -> None:
    tokens, shown = entries(EMOJI), shown_of(EMOJI)
    chunks = [
        ("".join(shown[at : at + size]), tokens[at : at + size])
        for at in range(0, len(tokens), size)
    ]
    assert fit(page, *chunks) == (shown, len(tokens))


def test_text_that_comes_later_than_its_tokens(page: Page) -> None:
    """It may have begun a stop string."""
    tokens = entries("😀ab🎉c")
    chunks = [("", tokens[:5]), ("😀", []), ("", tokens[5:]), ("a", []), ("b🎉c", [])]
    assert fit(page, *chunks) == (shown_of("😀ab🎉c"), len(tokens))
    words = [entry(b"<|x|>"), entry(b"ab"), entry(b"a")]
    assert fit(page, ("a", words[1:]), ("ba", []))[0] == ["ab", "a"]
    assert fit(page, ("a", words), ("ba", []))[0] == ["", "ab", "a"]


def test_a_part_may_share_a_token_with_whole_characters(page: Page) -> None:
    raw = "a😀b😀".encode()
    pieces = [raw[:3], raw[3:4], raw[4:8], raw[8:]]
    assert fit(page, ("a😀b😀", [entry(piece) for piece in pieces]))[0] == ["a", "", "😀b", "😀"]


def test_hidden_tokens_shift_nothing(page: Page) -> None:
    hidden = entry(b"<|x|>")
    tokens = [hidden, *entries("😀"), hidden, *entries("😀🎉"), hidden]
    shown = ["", *shown_of("😀"), "", *shown_of("😀🎉"), ""]
    assert fit(page, ("😀😀🎉", tokens)) == (shown, len(tokens) - 1)
    literal = [hidden, *entries("a<|x|>")]
    assert fit(page, ("a<|x|>", literal)) == (["", *"a<|x|>"], len(literal))


def test_a_hidden_token_inside_a_character_shifts_nothing_after_it(page: Page) -> None:
    first, second = entries("😀")[:2], entries("😀")[2:]
    shown, _ = fit(page, ("😀a🎉", [*first, entry(b"<|x|>"), *second, *entries("a🎉")]))
    assert "".join(shown[:5]) == "😀"
    assert shown[5:] == shown_of("a🎉")


def test_a_stop_string_that_was_cut(page: Page) -> None:
    tokens = entries("😀🎉")
    assert fit(page, ("😀", tokens))[0] == [*shown_of("😀"), "", "", "", ""]
    merged = [*tokens[:2], entry("😀".encode()[2:] + b" stop")]
    assert fit(page, ("😀 ", merged))[0] == ["", "", "😀 "]


def test_leading_spaces_that_a_tokenizer_drops(page: Page) -> None:
    words = [entry(b" Hi", "Hi"), entry(b" you", "you"), *entries("😀"), entry(b" ", "")]
    shown = ["Hi", " you", *shown_of("😀"), " "]
    assert fit(page, ("Hi you😀 ", words)) == (shown, len(words))
    assert fit(page, ("Hi", words[:1])) == (["Hi"], 1)


def test_bytes_that_are_no_character(page: Page) -> None:
    broken = entries("😀")[:3]
    tokens = [*broken, *entries("a😀"), *broken]
    shown = ["", "", "\ufffd", *shown_of("a😀"), "", "", "\ufffd"]
    assert fit(page, ("\ufffda😀\ufffd", tokens))[0] == shown
    # A decoder with byte fallback writes U+FFFD for each byte.
    shown, early = fit(page, ("\ufffd\ufffd\ufffda", []), ("", [*broken, entry(b"a")]))
    assert ("".join(shown), early) == ("\ufffd\ufffd\ufffda", 4)


def test_tokens_whose_bytes_are_unknown_beside_others(page: Page) -> None:
    unknown = [{**token, "bytes": None} for token in entries("é")]
    tokens = [*unknown, *entries("y😀")]
    assert fit(page, ("éy😀", tokens))[0] == ["é", "", *shown_of("y😀")]


def test_each_character_of_an_emoji_answer_has_a_token_to_point_at(page: Page) -> None:
    ask(page, f'[[{{"burst": 3}}]]{EMOJI}')
    assert answer_text(page) == EMOJI
    tokens = page.locator(".answer .token:not(.unseen)")
    assert tokens.evaluate_all(TEXTS) == shown_of(EMOJI)
    steps = tokens.evaluate_all("nodes => nodes.map((node) => Number(node.dataset.step))")
    assert steps == [at // 3 for at in range(sum(SIZES))]
    note = page.get_by_role("tooltip")
    for end, size in zip(ENDS, SIZES, strict=True):
        tokens.nth(end).hover()
        lines = note.inner_text().splitlines()
        assert lines[3] == json.dumps(EMOJI[ENDS.index(end)], ensure_ascii=False)
        raw = EMOJI.encode()[end + 1 - size : end + 1]
        wanted = [
            f"{byte:02x}: {'target' if at % 3 == 2 else 'script'} · depth {at % 3 + 1}"
            f" · step {at // 3}"
            for at, byte in enumerate(raw, end + 1 - size)
        ]
        assert [line.rpartition(" · ")[0] for line in lines[4:]] == (wanted if size > 1 else [])


def test_keys_go_from_character_to_character(page: Page) -> None:
    ask(page, '[[{"burst": 3}]]😀🎉a')
    page.get_by_role("button", name="Edit").focus()
    page.keyboard.press("Tab")
    reached = []
    for _ in range(3):
        reached.append(page.evaluate("document.activeElement.textContent"))
        page.keyboard.press("ArrowRight")
    assert reached == ["😀", "🎉", "a"]


def test_rejected_drafts_and_step_marks_stand_where_their_steps_do(page: Page) -> None:
    """Steps of three tokens, each with a rejected draft, while characters have four."""
    text = "😀😀🎉"
    tokens = [
        {**token, "step": at // 3, "depth": at % 3 + 1} for at, token in enumerate(entries(text))
    ]
    rejected = [
        {"step": step, "depth": 2, "id": 9, "text": f"not{step}", "sources": ["suffix"]}
        for step in range(4)
    ]
    chunks = []
    for step in range(4):
        own = slice(3 * step, 3 * step + 3)
        choice = {
            "index": 0,
            "delta": {"content": "".join(shown_of(text)[own])},
            "finish_reason": "stop" if step == 3 else None,
            "token_info": tokens[own],
            "rejected_drafts": [rejected[step]],
        }
        chunks.append(f"data: {json.dumps({'choices': [choice]})}\n\n")
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream", body="".join(chunks) + "data: [DONE]\n\n"
        ),
    )
    ask(page, "emoji")
    page.get_by_role("button", name="Rejected drafts").click()
    page.get_by_role("button", name="Steps").click()
    places = page.locator(".answer > .tokens > span").evaluate_all(
        "nodes => nodes.map((node) => (node.matches('.begins') ? '|' : '') + node.textContent)"
    )
    assert [place for place in places if place] == [
        "|", "not0", "|😀", "not1", "|", "😀", "not2", "|", "🎉", "not3",
    ]  # fmt: skip
    widths = page.locator(".begins").evaluate_all("nodes => nodes.map((n) => n.offsetWidth)")
    assert len(widths) == 4
    assert min(widths) > 0
    assert page.get_by_role("img", name="4 steps, at most 3 tokens in one").is_visible()
    page.locator(".token", has_text="😀").first.hover()
    steps = [
        line.split(" · ")[2] for line in page.get_by_role("tooltip").inner_text().splitlines()[4:]
    ]
    assert steps == ["step 0", "step 0", "step 0", "step 1"]


def test_a_difference_inside_a_character_marks_the_character(page: Page) -> None:
    ask(page, '[[{"burst": 3}]]a😀')

    def answer_otherwise(route: Any) -> None:
        body = json.loads(route.request.post_data or "")
        body["messages"][-1]["content"] = "[[{}]]a🎉"
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", answer_otherwise)
    page.get_by_role("button", name="Same seed without speculation").click()
    page.locator(".comparison.different").wait_for()
    assert page.locator(".verdict").inner_text().startswith("They differ from token 4 on.")
    assert page.locator(".token.differs").all_inner_texts() == ["😀", "🎉"]
