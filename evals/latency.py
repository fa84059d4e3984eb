"""Decode speed of one stream, measured interleaved so that all sides see the same machine."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch

from specdec import checkpoints
from specdec.config import EngineConfig, WeightPrecision
from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.evals.prompts import PROMPTS
from specdec.generation import generate
from specdec.loading import load_model, resolve_precision
from specdec.params import SamplingParams

BASELINE, DRAFTED = "specdec, no drafts", "specdec, ngram"
PEERS = ("transformers",)


@dataclass(frozen=True)
class Run:
    """One answer: output tokens, seconds from submission to the end, and to the first token."""

    num_tokens: int
    total_s: float
    tokens_per_step: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.total_s


Contender = Callable[[Sequence[int], int], Run]


def measure(
    *,
    model: str,
    weights: WeightPrecision,
    node_budget: int,
    peers: Sequence[str],
    max_tokens: int,
    rounds: int,
) -> dict[str, Any]:
    """Greedy answers to every prompt by every contender, `rounds` times in turn.

    End to end, prompt included. Returns medians per (prompt, contender), the ratios that matter,
    and what machine they are from. Raises UsageError for an unknown peer.
    """
    from rich.progress import Progress

    for peer in peers:
        if peer not in PEERS:
            raise UsageError(f"unknown peer {peer!r}; choose from {', '.join(PEERS)}")
    contenders, encode = _contenders(model, weights, node_budget, peers)
    runs: dict[str, dict[str, list[Run]]] = {p: {c: [] for c in contenders} for p in PROMPTS}
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=(rounds + 1) * len(PROMPTS) * len(contenders))
        for index in range(rounds + 1):
            for prompt, text in PROMPTS.items():
                ids = encode(text)
                for name, contender in contenders.items():
                    run = contender(ids, max_tokens)
                    if index:  # the first round warms up
                        runs[prompt][name].append(run)
                    progress.advance(task)
    return {
        "machine": _machine(weights),
        "settings": {
            "model": model,
            "node_budget": node_budget,
            "max_tokens": max_tokens,
            "rounds": rounds,
        },
        "prompts": {prompt: _summary(by_name) for prompt, by_name in runs.items()},
    }


def _contenders(
    model: str, weights: WeightPrecision, node_budget: int, peers: Sequence[str]
) -> tuple[dict[str, Contender], Callable[[str], list[int]]]:
    config = EngineConfig(model=model, weights=weights, prefix_cache=False)
    loaded = load_model(config)
    contenders: dict[str, Contender] = {}
    for name, drafter in ((BASELINE, "none"), (DRAFTED, "ngram")):
        engine = Engine(
            EngineConfig(
                model=model,
                weights=weights,
                drafter=drafter,
                node_budget=node_budget,
                prefix_cache=False,  # a prefix hit would make later rounds cheaper than the first
                kv_memory_mib=512,
            ),
            loaded=loaded,
        )
        contenders[name] = _ours(engine)
    if "transformers" in peers:
        contenders["transformers"] = _transformers(model, loaded.eos_token_ids)
    tokenizer = engine.tokenizer
    return contenders, lambda text: tokenizer.encode_chat([{"role": "user", "content": text}])


def _ours(engine: Engine) -> Contender:
    def run(ids: Sequence[int], max_tokens: int) -> Run:
        result = generate(engine, ids, SamplingParams(max_tokens=max_tokens))
        return Run(len(result.tokens), result.total_s, result.stats.tokens_per_step)

    return run


def _transformers(model: str, eos_token_ids: Sequence[int]) -> Contender:
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(checkpoints.resolve(model), dtype=torch.bfloat16)

    def run(ids: Sequence[int], max_tokens: int) -> Run:
        torch.set_num_threads(os.cpu_count() or 1)  # the engine's forward has threads of its own
        started = time.perf_counter()
        prompt = torch.tensor([list(ids)])
        output = peer.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(eos_token_ids),
            pad_token_id=eos_token_ids[0],
        )
        total_s = time.perf_counter() - started
        torch.set_num_threads(1)
        return Run(output.shape[1] - len(ids), total_s, 1.0)

    return run


def _summary(by_name: dict[str, list[Run]]) -> dict[str, Any]:
    """Medians, spreads and ratios; a ratio is the median over rounds of that round's ratio."""
    speeds = {name: [run.tokens_per_second for run in runs] for name, runs in by_name.items()}

    def ratio(side: str, other: str) -> float:
        pairs = zip(speeds[side], speeds[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 2)

    return {
        "contenders": {
            name: {
                "tokens_per_second": round(statistics.median(values), 1),
                "min": round(min(values), 1),
                "max": round(max(values), 1),
                "num_tokens": by_name[name][0].num_tokens,
                "tokens_per_step": round(by_name[name][0].tokens_per_step, 2),
                "runs": [asdict(run) for run in by_name[name]],
            }
            for name, values in speeds.items()
        },
        "ratios": {
            f"{DRAFTED} / {BASELINE}": ratio(DRAFTED, BASELINE),
            **{
                f"{BASELINE} / {peer}": ratio(BASELINE, peer)
                for peer in speeds
                if peer not in (BASELINE, DRAFTED)
            },
        },
    }


def _machine(weights: WeightPrecision) -> dict[str, Any]:
    return {
        "processor": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "weights": resolve_precision(weights, torch.device("cpu")),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("specdec-server", "torch")},
    }


def render(report: dict[str, Any]) -> str:
    """The report as a table and its ratios."""
    from rich.console import Console
    from rich.table import Table

    table = Table("prompt", "contender", "tokens/s", "min-max", "tokens", "tokens/step")
    lines = []
    for prompt, summary in report["prompts"].items():
        for name, row in summary["contenders"].items():
            spread = f"{row['min']}-{row['max']}"
            speed, steps = str(row["tokens_per_second"]), str(row["tokens_per_step"])
            table.add_row(prompt, name, speed, spread, str(row["num_tokens"]), steps)
        lines += [f"{prompt}: {name} = {value}x" for name, value in summary["ratios"].items()]
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    return capture.get() + "\n".join(lines)
