"""`specdec eval quantization`: its arithmetic, windows, refusals, and a toy model's report."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from specdec.config import EngineConfig
from specdec.errors import UsageError
from specdec.evals import eval_commands, quantization
from specdec.evals.quantization import Divergence, PredictionReader, evaluate, read_texts, split
from specdec.loading import load_model
from tests.evals.toy_folder import load_or_skip, toy_config, write_toy

TEXT = "the quick brown fox jumps over the lazy dog, and then it jumps back."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("quantization") / "model")


@pytest.fixture
def native(folder: Path) -> EngineConfig:
    config = toy_config(folder, "native")
    load_or_skip(config)
    return config


# --- arithmetic ---


def log_probs(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_divergence_of_known_distributions() -> None:
    """Powers of two: a token of 1/4 and one of 1/2 give perplexity 2 ** 1.5."""
    model = log_probs((0.25, 0.5, 0.25), (0.5, 0.25, 0.25))
    reference = log_probs((0.25, 0.5, 0.25), (0.25, 0.5, 0.25))
    found = Divergence()
    found.add(model, reference, [0, 0])
    assert found.perplexity == pytest.approx(2**1.5, rel=1e-6)  # fp32 logarithms
    # The second row: 1/4 * log(1/2) + 1/2 * log 2 + 1/4 * log 1.
    summary = found.summary(reference_perplexity=2.0)
    assert summary["mean_kl"] == pytest.approx(math.log(2) / 4 / 2, rel=1e-6)
    assert summary["agreement_percent"] == 50.0 and summary["num_tokens"] == 2
    assert summary["excess_percent"] == pytest.approx(100 * (2**0.5 - 1), rel=1e-5)
    other = Divergence()
    other.add(model, reference, [1, 1])  # the wrong targets
    assert other.perplexity == pytest.approx(found.perplexity, rel=1e-6)  # 1/2 and 1/4: the same
    other.add(model, reference, [2, 2])
    assert other.perplexity != pytest.approx(found.perplexity, rel=1e-2)


def test_kl_is_of_the_reference_from_the_model_and_not_the_other_way() -> None:
    p, q = log_probs((0.5, 0.5)), log_probs((0.25, 0.75))
    forwards, backwards = Divergence(), Divergence()
    forwards.add(q, p, [0])
    backwards.add(p, q, [0])
    assert forwards.kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-6)
    assert backwards.kl != pytest.approx(forwards.kl, rel=1e-2)


def test_windows_hold_every_token_once_and_none_alone() -> None:
    assert list(split(range(7), 3)) == [range(3), range(3, 6)]  # 6 has nothing to predict
    assert list(split(range(8), 3)) == [range(3), range(3, 6), range(6, 8)]
    assert list(split([1], 3)) == list(split([], 3)) == []


# --- on a toy model ---


def test_fp32_is_its_own_reference_and_the_others_are_not(native: EngineConfig) -> None:
    report = evaluate(native, {"a": TEXT, "b": TEXT}, ("bf16", "int8", "int4", "fp32"), ("auto",))
    json.dumps(report, allow_nan=False)
    rows = {row["weights"]: row for row in report["variants"]}
    assert list(rows) == ["bf16", "int8", "int4", "fp32"]
    same = rows["fp32"]
    assert (same["excess_percent"], same["agreement_percent"], same["mean_kl"]) == (0.0, 100.0, 0.0)
    assert same["perplexity"] == report["reference_perplexity"]
    assert all(row["num_tokens"] == 2 * (len(TEXT) - 1) for row in rows.values())
    assert all(rows[name]["mean_kl"] > 0 for name in ("bf16", "int8", "int4"))
    text = quantization.report_of(report).text()
    assert "windows of 512 tokens" in text and len(text.splitlines()) == 3 + 1 + 1 + 4


def test_every_combination_is_measured(native: EngineConfig) -> None:
    report = evaluate(native, {"a": TEXT}, ("fp32", "bf16"), ("fp32", "int8"))
    rows = {(row["weights"], row["kv"]): row["mean_kl"] for row in report["variants"]}
    assert list(rows) == [("fp32", "fp32"), ("fp32", "int8"), ("bf16", "fp32"), ("bf16", "int8")]
    assert rows["fp32", "fp32"] == 0.0 < rows["fp32", "int8"]
    assert rows["bf16", "fp32"] != rows["bf16", "int8"]


def test_perplexity_is_that_of_the_whole_window_at_once(native: EngineConfig) -> None:
    """Rows are invariant, so chunks change nothing; the sum is taken again in fp64."""
    loaded = load_model(native)
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode(TEXT)
    reader = PredictionReader(loaded, "fp32", len(ids), native.block_size)
    log_p = reader.log_probs(ids[:-1], 0).double()
    nll = -log_p[range(len(ids) - 1), ids[1:]].mean()
    for chunk in (7, 16, 128):
        with patch.object(quantization, "CHUNK", chunk):
            report = evaluate(native, {"a": TEXT}, ("fp32",), ("auto",))
        # Both add the same fp32 log-probabilities in fp64, in another order.
        assert report["reference_perplexity"] == pytest.approx(nll.exp().item(), rel=1e-12)
    shifted = -log_p[range(len(ids) - 2), ids[2:]].mean()  # each token predicts the one after next
    assert shifted.exp().item() != pytest.approx(report["reference_perplexity"], rel=1e-2)


def test_windows_are_predicted_apart(native: EngineConfig) -> None:
    """Two windows of the same text are the text twice, though one is behind the other."""
    once = evaluate(native, {"a": TEXT}, ("bf16",), ("auto",))
    twice = evaluate(native, {"a": TEXT + TEXT}, ("bf16",), ("auto",), window=len(TEXT))
    first, second = once["variants"][0], twice["variants"][0]
    assert second["num_tokens"] == 2 * first["num_tokens"]
    assert second["perplexity"] == pytest.approx(first["perplexity"], rel=1e-12)
    assert second["mean_kl"] == pytest.approx(first["mean_kl"], rel=1e-12)


def test_pytorchs_forward_is_measured_too(folder: Path) -> None:
    report = evaluate(toy_config(folder, "torch"), {"a": TEXT}, ("bf16", "fp32"), ("auto",))
    kls = [row["mean_kl"] for row in report["variants"]]
    assert kls[0] > 0.0 == kls[1]


# --- what is wrong is one line ---


def test_refusals(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xe9")
    for files, words in (
        ([], "give --text FILE"),
        ([tmp_path / "none"], "cannot read .*none: No such file"),
        ([tmp_path / "latin"], "latin is not UTF-8 text"),
    ):
        with pytest.raises(UsageError, match=words):
            read_texts(files)
    config = toy_config(folder, "torch")
    with pytest.raises(UsageError, match="no token to predict"):
        evaluate(config, {"a": "x"}, ("fp32",), ("auto",))
    with pytest.raises(UsageError, match="unknown weights 'int3'"):
        evaluate(config, {"a": TEXT}, ("int3",), ("auto",))  # type: ignore[arg-type]  # keywords as the command line has them
    with pytest.raises(UsageError, match="int8 weights are served on a CPU by --backend native"):
        evaluate(config, {"a": TEXT}, ("int8",), ("auto",))
    loaded = replace(load_model(config), tokenizer=None)
    with (
        patch.object(quantization, "load_model", lambda config: loaded),
        pytest.raises(UsageError, match="no tokenizer"),
    ):
        evaluate(config, {"a": TEXT}, ("fp32",), ("auto",))


def test_the_command_prints_a_table_or_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    arguments = {"text": [path], "weights": "fp32,bf16", "backend": "torch", "model": str(folder)}
    eval_commands.quantization(**arguments, out=tmp_path / "out")  # type: ignore[arg-type]  # keywords as the command line has them
    assert capsys.readouterr().out.startswith(f"Quantisation: {folder} on {path}\n")
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"quantization.json", "quantization-perplexity.png"} <= written
    eval_commands.quantization(**arguments, as_json=True)  # type: ignore[arg-type]  # keywords as the command line has them
    report = json.loads(capsys.readouterr().out)
    assert [row["weights"] for row in report["variants"]] == ["fp32", "bf16"]
    assert report["texts"] == [str(path)]
    with pytest.raises(UsageError, match="unknown weights ''"):
        eval_commands.quantization(**{**arguments, "weights": "fp32,"})  # type: ignore[arg-type]  # keywords as the command line has them
