"""Contenders: ours and peers', what a peer misses, and answers of the same length."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from specdec.engine import Engine
from specdec.errors import SpecdecError, UsageError
from specdec.evals.latency import peers
from specdec.evals.latency.contender import Run, checked, num_equal, ours
from specdec.evals.latency.peers import PeerSetup
from tests.evals.toy_folder import toy_config, write_toy
from tests.toy import toy_engine


def test_our_contender_answers_with_as_many_tokens_as_it_is_told() -> None:
    """Past an end token too; with drafts the same ones."""
    engines = [toy_engine(drafter_name=name, prefix_cache=False) for name in ("none", "ngram")]
    plain, drafted = (ours(engine)((1, 2, 3) * 6, 60) for engine in engines)
    assert plain.token_ids == drafted.token_ids and len(plain.token_ids) == 60
    assert drafted.tokens_per_step > plain.tokens_per_step == 1.0
    assert plain.tokens_per_second == 60 / plain.total_s


def test_a_peer_with_another_number_of_tokens_is_no_comparison() -> None:
    peer = checked("lazy", lambda prompt_ids, num_tokens: Run((1, 2), 1.0))
    assert peer((5,), 2).token_ids == (1, 2)
    with pytest.raises(SpecdecError, match="lazy answered with 2 tokens instead of 3"):
        peer((5,), 3)


def make(peer: str, setup: PeerSetup) -> None:
    """As `measure` does."""
    peers.check_peers([peer], setup)
    peers.make_peers([peer], setup)


@pytest.mark.parametrize(
    ("peer", "module", "words"),
    [
        ("nobody", None, "unknown peer 'nobody'; choose from transformers, openvino, llama.cpp"),
        ("openvino", None, "needs --openvino-model FOLDER; write one once: optimum-cli export"),
        ("llama.cpp", None, "needs --gguf FILE"),
        ("transformers", "transformers", r"pip install 'specdec-server\[evals\]'"),
        ("openvino", "openvino_genai", "pip install openvino-genai"),
        ("llama.cpp", "llama_cpp", "pip install llama-cpp-python"),
    ],
)
def test_what_a_peer_misses_is_one_line(
    tmp_path: Path, peer: str, module: str | None, words: str
) -> None:
    setup = PeerSetup("model", 100)
    if module is not None:  # everything else is there
        (tmp_path / "openvino_model.xml").touch()
        setup = PeerSetup("model", 100, tmp_path, tmp_path / "openvino_model.xml")
        peers.check_peers([peer], setup)
    with (
        patch.dict(sys.modules, {} if module is None else {module: None}),
        pytest.raises(UsageError, match=words) as caught,
    ):
        make(peer, setup)
    assert "\n" not in str(caught.value)


def test_a_folder_or_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    setup = PeerSetup("model", 100, tmp_path, tmp_path / "no.gguf")
    with pytest.raises(UsageError, match=f"which {re.escape(str(tmp_path))} has not"):
        peers.check_peers(["openvino"], setup)
    with pytest.raises(UsageError, match=r"there is no .*no\.gguf"):
        peers.check_peers(["llama.cpp"], setup)


def test_transformers_answers_like_our_fp32(tmp_path: Path) -> None:
    """The same prompt and the same number of tokens, though to its checkpoint all end an answer."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    folder = write_toy(tmp_path / "model")
    ends = {"eos_token_id": list(range(256))}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    config = toy_config(folder, "torch")
    prompt = tuple(range(40, 60))
    own = ours(Engine(replace(config, drafter="none")))(prompt, 12)
    peer = peers.make_peers(["transformers"], PeerSetup(str(folder), 100))["transformers"]
    before = torch.get_num_threads()
    answer = peer(prompt, 12)
    assert torch.get_num_threads() == before
    assert len(answer.token_ids) == 12
    assert num_equal(answer.token_ids, own.token_ids) > 0  # bf16 may part from fp32 later


def test_equal_tokens_end_at_the_first_difference() -> None:
    assert num_equal((1, 2, 3), (1, 9, 3)) == 1
    assert num_equal((1, 2), (1, 2)) == num_equal((1, 2), (1, 2, 3)) == 2
    assert num_equal((), (1,)) == 0
