"""Quantisation: what each precision of weights and KV cache does to a text's predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from specdec.config import EngineConfig, KVPrecision, WeightPrecision
from specdec.errors import UsageError
from specdec.evals.report.machine import origin
from specdec.evals.report.progress import progress
from specdec.evals.report.report import Report
from specdec.evals.report.tables import Table
from specdec.kernels.batch import Batch
from specdec.kernels.segment import Segment
from specdec.kv_cache import slot_at
from specdec.loading import LoadedModel, load_model
from specdec.model_runner import ModelRunner

if TYPE_CHECKING:  # drawn only into a folder, and matplotlib is an extra
    from matplotlib.figure import Figure

WINDOW = 1024  # tokens that are predicted from one another
CHUNK = 128  # rows of a forward: logits of more would fill the memory
REFERENCE: Final = "fp32"


@dataclass
class Divergence:
    """How one model's predictions differ from the reference's, summed over positions.

    `nll` and `kl` are in nats: minus the log-probability of the text's own next tokens, and
    KL(reference || model).
    """

    num_tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    num_agreeing: int = 0  # positions whose likeliest token is the reference's

    def add(self, log_p: Tensor, log_r: Tensor, targets: Sequence[int]) -> None:
        """Count positions. log_p, log_r: log-probabilities [num_tokens, vocab], ours and the
        reference's; targets: the text's token that each position is to predict.
        """
        own = log_p.gather(1, torch.tensor(targets)[:, None])
        self.num_tokens += len(targets)
        self.nll -= own.sum(dtype=torch.float64).item()
        self.kl += (log_r.exp() * (log_r - log_p)).sum(dtype=torch.float64).item()
        self.num_agreeing += int((log_p.argmax(-1) == log_r.argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.num_tokens)

    def summary(self, reference_perplexity: float) -> dict[str, Any]:
        """Perplexity and its excess over the reference's in %, agreement in %, mean KL in nats."""
        return {
            "perplexity": self.perplexity,
            "excess_percent": 100 * (self.perplexity / reference_perplexity - 1),
            "agreement_percent": 100 * self.num_agreeing / self.num_tokens,
            "mean_kl": self.kl / self.num_tokens,
            "num_tokens": self.num_tokens,
        }


def evaluate(
    config: EngineConfig,
    texts: Mapping[str, str],
    weights: Sequence[WeightPrecision],
    kv: Sequence[KVPrecision],
    *,
    window: int = WINDOW,
) -> dict[str, Any]:
    """Every text under every combination of precisions, beside fp32 weights with an fp32 KV cache.

    All models are in memory at once. Raises UsageError for an unknown precision, or for texts
    without a token to predict.
    """
    variants = [replace(config, weights=w, kv=k) for w, k in product(weights, kv)]
    reference_config = replace(config, weights=REFERENCE, kv=REFERENCE)
    models: dict[str, LoadedModel] = {}
    for variant in (reference_config, *variants):
        if variant.weights not in models:
            models[variant.weights] = load_model(variant)
    loaded = models[REFERENCE]
    window = min(window, loaded.max_model_len)
    if loaded.tokenizer is None:
        raise UsageError("this model has no tokenizer, so it has no text to predict")
    encode = loaded.tokenizer.encode
    windows = [part for text in texts.values() for part in split(encode(text), window)]
    if not windows:
        raise UsageError("the text has no token to predict: give --text FILE with more in it")
    reference = PredictionReader(loaded, REFERENCE, window, config.block_size)
    readers = [
        PredictionReader(models[v.weights], v.kv, window, config.block_size) for v in variants
    ]
    found = [Divergence() for _ in variants]
    itself = Divergence()
    num_chunks = sum(-(-(len(part) - 1) // CHUNK) for part in windows)
    with progress(num_chunks) as advance:
        for number, part in enumerate(windows, start=1):
            for start in range(0, len(part) - 1, CHUNK):
                advance(f"window {number} of {len(windows)}")
                targets = part[start + 1 : start + 1 + CHUNK]
                ids = part[start : start + len(targets)]
                expected = reference.log_probs(ids, start)
                itself.add(expected, expected, targets)
                for reader, divergence in zip(readers, found, strict=True):
                    divergence.add(reader.log_probs(ids, start), expected, targets)
    return {
        **origin(),
        "model": config.model,
        "texts": list(texts),
        "window": window,
        "reference_perplexity": itself.perplexity,
        "variants": [
            {"weights": v.weights, "kv": v.kv, **divergence.summary(itself.perplexity)}
            for v, divergence in zip(variants, found, strict=True)
        ],
    }


class PredictionReader:
    """Predicts a window chunk after chunk, with a KV cache of that size."""

    def __init__(self, loaded: LoadedModel, kv: str, window: int, block_size: int) -> None:
        self._block_ids = tuple(range(-(-window // block_size)))
        self._block_size = block_size
        kv_cache = loaded.model.make_kv_cache(
            kv, num_blocks=len(self._block_ids), block_size=block_size
        )
        self._runner = ModelRunner(loaded.model, kv_cache)

    def log_probs(self, token_ids: Sequence[int], start: int) -> Tensor:
        """Log-probabilities [num_tokens, vocab] of what follows each token, from `start` on."""
        count = len(token_ids)
        segment = Segment(0, count, start, self._block_ids)
        places = range(start, start + count)
        batch = Batch(
            token_ids=tuple(token_ids),
            positions=segment.positions,
            slots=tuple(slot_at(self._block_ids, p, self._block_size) for p in places),
            segments=(segment,),
            logit_rows=tuple(range(count)),
            first_logit=(0, count),
        )
        return self._runner.forward(batch).logits.float().log_softmax(-1)


def split(token_ids: Sequence[int], window: int) -> Iterator[Sequence[int]]:
    """Neighbouring windows; the first token of each is not predicted, a single one is left out."""
    for start in range(0, len(token_ids) - 1, window):
        yield token_ids[start : start + window]


def read_texts(files: Sequence[Path]) -> dict[str, str]:
    """Contents by path. Raises UsageError if there is none or one cannot be read."""
    if not files:
        raise UsageError("give --text FILE, a local text to predict; several are welcome")
    texts = {}
    for file in files:
        try:
            texts[str(file)] = file.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise UsageError(f"{file} is not UTF-8 text") from None
    return texts


def report_of(data: Mapping[str, Any]) -> Report:
    """A line per combination of precisions; data: of `evaluate`."""
    rows = [
        (
            *(row["weights"], row["kv"], f"{row['perplexity']:.3f}"),
            *(f"{row['excess_percent']:.2f}", f"{row['agreement_percent']:.2f}"),
            *(f"{row['mean_kl']:.5f}", row["num_tokens"]),
        )
        for row in data["variants"]
    ]
    head = ("weights", "kv", "perplexity", "excess %", "same token %", "mean KL", "tokens")
    reference = data["reference_perplexity"]
    return Report(
        "quantization",
        f"Quantisation: {data['model']} on {', '.join(data['texts'])}",
        data,
        (f"windows of {data['window']} tokens; perplexity of fp32: {reference:.3f}",),
        (Table("precisions", head, rows),),
        {"perplexity": lambda: _plot(data)},
    )


def _plot(data: Mapping[str, Any]) -> Figure:
    from specdec.evals.report.style import bar_style, new_figure, tidy

    figure = new_figure(f"Perplexity over that of fp32: {data['model']}", data, height=3.5)
    axes = figure.subplots()
    names = [f"{row['weights']}, KV {row['kv']}" for row in data["variants"]]
    bars = axes.barh(names, [row["excess_percent"] for row in data["variants"]], **bar_style(1))
    axes.bar_label(bars, fmt="%+.2f %%", padding=3)
    axes.axvline(0, color="0.35", linewidth=1)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel("excess in %")
    tidy(axes)
    return figure
