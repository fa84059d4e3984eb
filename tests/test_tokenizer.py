"""Tokenizer: ids, end-of-text ids, and chats through Jinja templates."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from specdec.chat_template import ChatTemplates
from specdec.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from specdec.tokenizer import Tokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am "}]


def backend() -> tokenizers.Tokenizer:
    """Byte-level BPE that merges "a b", with <|im_start|> put before every text."""
    vocab = {token: i for i, token in enumerate([*SPECIALS, *pre_tokenizers.ByteLevel.alphabet()])}
    vocab["ab"] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return tokenizer


def with_template(template: str | dict[str, str]) -> Tokenizer:
    return Tokenizer(backend(), chat_template=template, special_tokens={"bos_token": "<s>"})


def write(folder: Path, **files: Any) -> Path:
    """Write tokenizer.json and `files` (name without .json to contents) into `folder`."""
    backend().save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_encode_then_decode_gives_the_text_back(text: str) -> None:
    tokenizer = Tokenizer(backend())
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text


def test_special_tokens_are_single_ids_that_decode_skips() -> None:
    tokenizer = Tokenizer(backend())
    ids = tokenizer.encode("ab<|im_end|>", add_special_tokens=False)
    assert ids == [259, 2]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<|im_end|>"
    assert [tokenizer.is_hidden(x) for x in (2, 259, 260)] == [True, False, True]
    assert tokenizer.vocab_size == 260


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_the_bytes_of_tokens_are_those_of_the_text(text: str) -> None:
    tokenizer = Tokenizer(backend())
    ids = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == f"{text}<|im_end|>".encode()


def test_tokens_of_a_vocabulary_of_characters_have_bytes_too() -> None:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "<0xC3>": 3, "<0xA9>": 4, "▁a": 5}
    plain = tokenizers.Tokenizer(
        models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    plain.pre_tokenizer = pre_tokenizers.Metaspace()
    plain.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = Tokenizer(plain)
    ids = tokenizer.encode("a aé")
    assert ids == [5, 5, 3, 4]
    assert b"".join(map(tokenizer.token_bytes, ids)) == " a aé".encode()
    assert [tokenizer.token_text(token_id) for token_id in (5, 3, 99)] == ["▁a", "<0xC3>", ""]
    assert tokenizer.token_bytes(99) == b""


def test_limits_kept_from_training_do_not_apply(tmp_path: Path) -> None:
    limited = backend()
    limited.enable_truncation(2)
    limited.enable_padding(length=8)
    limited.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("xyz")) == 4


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        Tokenizer(backend()).encode(json.loads('"\\ud83d"'))


def test_eos_ids_come_from_all_three_files(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        generation_config={"eos_token_id": [7, 5]},
        config={"eos_token_id": [5, 6]},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}},
    )
    assert Tokenizer.load(folder).eos_token_ids == (7, 5, 6, 2)
    write(tmp_path, generation_config={}, config={"eos_token_id": None}, tokenizer_config={})
    assert Tokenizer.load(folder).eos_token_ids == ()


def test_load_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(tmp_path)
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


def test_templates_are_found_where_checkpoints_keep_them(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "in config"})
    assert Tokenizer.load(tmp_path).render_chat(CHAT) == "in config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.load(tmp_path).render_chat(CHAT) == "plain"
    assert Tokenizer.load(tmp_path).render_chat(CHAT, tools=[{"type": "function"}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("in {{ eos_token }} file")
    write(tmp_path, tokenizer_config={"chat_template": named, "eos_token": "<|im_end|>"})
    assert Tokenizer.load(tmp_path).render_chat(CHAT) == "in <|im_end|> file"


def test_chat_with_and_without_generation_prompt() -> None:
    tokenizer = with_template(CHATML)
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nI am <|im_end|>\n"
    assert tokenizer.render_chat(CHAT, add_generation_prompt=False) == text
    assert tokenizer.render_chat(CHAT) == text + "<|im_start|>assistant\n"


def test_encode_chat_adds_no_special_tokens_again() -> None:
    ids = with_template(CHATML).encode_chat(CHAT)
    assert ids[0] == 1
    assert ids[1] != 1
    assert ids.count(1) == 3


@pytest.mark.parametrize(
    ("template", "ending"),
    [(CHATML, "I am "), (CHATML.replace("['content']", "['content'] | trim"), "I am")],
)
def test_continue_final_message_ends_inside_it(template: str, ending: str) -> None:
    text = with_template(template).render_chat(CHAT, continue_final_message=True)
    assert text == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{ending}"
    assert CHAT[-1]["content"] == "I am "


@pytest.mark.parametrize("chat", [[], [{"role": "user"}], [{"role": "user", "content": []}]])
def test_continue_needs_text_to_continue(chat: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequest, match="no text to continue"):
        with_template(CHATML).render_chat(chat, continue_final_message=True)


def test_continue_asks_for_no_generation_prompt() -> None:
    tokenizer = with_template("{{ add_generation_prompt }} {{ messages[-1].content }}")
    assert tokenizer.render_chat(CHAT, continue_final_message=True) == "False I am "


def test_continue_with_a_template_that_drops_the_message() -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        with_template("nothing").render_chat(CHAT, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}", "x"),
        ("  {% if true %}\nkept\n  {% endif %}\n", "kept\n"),
        ("{{ value | tojson }}", '{"é": "<&>"}'),
        ("{{ value | tojson(indent=1) }}", '{\n "é": "<&>"\n}'),
        ("{{ bos_token }}{{ tools is none }}{{ missing }}", "<s>True"),
        ("{% generation %}{{ 1 + 1 }}{% endgeneration %}", "2"),
        ("{{ messages[0].content is defined }}{{ nothing is defined }}", "TrueFalse"),
    ],
)
def test_template_features(template: str, text: str) -> None:
    assert with_template(template).render_chat(CHAT, value={"é": "<&>"}) == text


def test_strftime_now() -> None:
    assert with_template("{{ strftime_now('%Y') }}").render_chat(CHAT) in (
        str(datetime.now().year - 1),
        str(datetime.now().year),
    )


def test_a_null_in_a_message_is_as_if_it_were_absent() -> None:
    tokenizer = with_template("{{ 'tool_calls' in messages[0] }}")
    assert tokenizer.render_chat([{"role": "user", "tool_calls": None}]) == "False"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "refuses .*: roles must alternate$"),
        ("{{ 'a' + messages[0]['content'] + 1 }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses .*unsafe"),
        ("{{ none.x.y }}", "refuses"),
    ],
)
def test_a_template_that_fails_refuses_the_request(template: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        with_template(template).render_chat(CHAT)
    assert refused.value.param == "messages"


def test_no_template_and_invalid_template() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(backend()).render_chat(CHAT)
    with pytest.raises(CheckpointError, match="chat template is invalid"):
        with_template("{% if %}").render_chat(CHAT)


BASE = backend().to_str()  # the alphabet comes in another order each time


def like_base(edit: Callable[[dict[str, Any]], object] = lambda state: None) -> Tokenizer:
    """The same tokenizer each time, but for what `edit` does to its tokenizer.json."""
    state = json.loads(BASE)
    edit(state)
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)))


def test_the_first_difference_between_tokenizers_is_the_lowest_id() -> None:
    assert like_base().first_difference(like_base()) is None
    tokens = sorted(json.loads(BASE)["model"]["vocab"].items(), key=lambda item: item[1])
    (first, _), (second, _) = tokens[50], tokens[90]

    def swap(state: dict[str, Any]) -> None:
        vocab = state["model"]["vocab"]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    assert like_base().first_difference(like_base(swap)) == (50, first, second)
    assert like_base(swap).first_difference(like_base()) == (50, second, first)


def test_what_only_one_tokenizer_has_behind_the_other_is_no_difference() -> None:
    def pad(state: dict[str, Any]) -> None:
        state["model"]["vocab"] |= {"<pad-0>": 260, "<pad-1>": 261}

    assert like_base(pad).vocab_size == 262
    assert like_base().first_difference(like_base(pad)) is None
    assert like_base(pad).first_difference(like_base()) is None


def test_special_tokens_that_differ_are_a_difference() -> None:
    def rename(state: dict[str, Any]) -> None:
        (special,) = (token for token in state["added_tokens"] if token["id"] == 2)
        special["content"] = "<|eot|>"
        vocab = state["model"]["vocab"]
        vocab["<|eot|>"] = vocab.pop("<|im_end|>")

    assert like_base().first_difference(like_base(rename)) == (2, "<|im_end|>", "<|eot|>")


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    """One large request must not stop a server's event loop."""
    encoding = threading.Thread(target=Tokenizer(backend()).encode, args=("ab " * 500_000,))
    num_turns = 0
    encoding.start()
    while encoding.is_alive():
        num_turns += 1
        time.sleep(0)
    assert num_turns > 100


def test_a_prompt_may_be_as_long_as_is_allowed_and_no_longer() -> None:
    templates = ChatTemplates({"default": "{{ messages[0].content }}!"})
    chat = [{"role": "user", "content": "ab"}]
    assert templates.render(chat, max_len=3) == "ab!"
    with pytest.raises(ContextLengthExceeded, match="more than 2 characters"):
        templates.render(chat, max_len=2)
