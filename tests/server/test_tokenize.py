"""/tokenize and /detokenize: both dialects, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from specdec.tokenizer import Tokenizer
from tests.server.conftest import RunningServer, make_folder

CHAT = [{"role": "user", "content": "Hé"}]


def tokenize(server: RunningServer, **body: Any) -> Any:
    answer = server.post("/tokenize", body)
    assert answer.status == 200, answer.text
    return answer.json


def test_a_prompt_in_the_form_of_vllm(server: RunningServer) -> None:
    ids = Tokenizer.load(server.folder).encode("Hé")
    answer = tokenize(server, model="toy", prompt="Hé")
    assert answer == {"count": 3, "max_model_len": 2048, "tokens": ids}
    named = tokenize(server, prompt="Hé", return_token_strs=True)
    assert named["token_strs"] == ["H", "Ã", "©"]


def test_messages_are_what_a_chat_would_be_asked_with(server: RunningServer) -> None:
    tokenizer = Tokenizer.load(server.folder)
    assert tokenize(server, messages=CHAT)["tokens"] == tokenizer.encode_chat(CHAT)
    answer = server.post("/v1/chat/completions", {"model": "toy", "messages": CHAT})
    assert answer.json["usage"]["prompt_tokens"] == tokenize(server, messages=CHAT)["count"]
    for options in ({"add_generation_prompt": False}, {"continue_final_message": True}):
        expected = tokenizer.encode_chat(CHAT, **options)
        assert tokenize(server, messages=CHAT, **options)["tokens"] == expected
    typed = [{"role": "user", "content": "<|end|>"}]
    assert tokenizer.eos_token_ids[0] not in tokenize(server, messages=typed)["tokens"]


def test_content_in_the_form_of_llama_cpp(server: RunningServer) -> None:
    h, first, second = Tokenizer.load(server.folder).encode("Hé")
    assert tokenize(server, content="Hé")["tokens"] == [h, first, second]
    assert tokenize(server, content="Hé", with_pieces=True, add_special=True)["tokens"] == [
        {"id": h, "piece": "H"},
        {"id": first, "piece": [0xC3]},
        {"id": second, "piece": [0xA9]},
    ]


def test_special_tokens_are_added_where_the_dialect_adds_them(tmp_path: Path) -> None:
    """vLLM does for a prompt unless told otherwise, llama.cpp only if it is told to."""
    folder = make_folder(tmp_path / "model")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = backend.token_to_id("<|end|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", eos)]
    )
    backend.save(str(folder / "tokenizer.json"))
    running = RunningServer(folder)
    running.wait_ready()
    try:
        for adds, body in (
            (True, {"prompt": "a"}),
            (False, {"prompt": "a", "add_special_tokens": False}),
            (False, {"content": "a"}),
            (True, {"content": "a", "add_special": True}),
        ):
            assert (tokenize(running, **body)["tokens"][0] == eos) == adds, body
    finally:
        running.end()


def test_there_and_back(server: RunningServer) -> None:
    text = "a<|end|> 🧪 \x00é\n"
    ids = tokenize(server, prompt=text)["tokens"]
    answer = server.post("/detokenize", {"tokens": ids})
    assert answer.json == {"prompt": text, "content": text}
    assert server.post("/detokenize", {"tokens": []}).json["content"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": CHAT, "chat_template": "x"}, "chat_template"),
        (
            "/tokenize",
            {
                "messages": CHAT,
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "continue_final_message",
        ),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_errors_name_the_field(
    server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    answer = server.post(path, body)
    assert answer.status == 400, answer.text
    assert answer.json["error"]["param"] == param


def test_another_model_is_not_found(server: RunningServer) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        answer = server.post(path, {**body, "model": "other"})
        assert answer.status == 404
        assert answer.json["error"]["code"] == "model_not_found"
