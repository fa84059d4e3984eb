"""Collection: what the target says to a prompt file, and its hidden states, as a corpus on disk.

corpus.py says how it lies there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specdec.config import EngineConfig
from specdec.drafters.training.corpus import TrainingSequence, write_shard
from specdec.drafters.training.prompts import Opening, Prompt
from specdec.drafting import Drafter
from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.loading import LoadedModel
from specdec.params import SamplingParams
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import DraftTree
from specdec.verification import Verdict

OnProgress = Callable[[int, int], None]  # requests done of all, output tokens so far


@dataclass(frozen=True)
class CollectionPlan:
    """What to collect: each prompt is answered once at each temperature, up to `max_tokens`."""

    prompts: Sequence[Prompt]
    temperatures: Sequence[float] = (0.0, 1.0)
    max_tokens: int = 192
    prompts_per_shard: int = 24  # what an interruption loses at most
    seed: int = 0

    @property
    def num_requests(self) -> int:
        return len(self.prompts) * len(self.temperatures)

    def fingerprint(self, model: str) -> str:
        """Names the corpus that this plan gives with a model."""
        facts = [[p.task, [dict(m) for m in p.messages]] for p in self.prompts]
        settings = [
            model, list(self.temperatures), self.max_tokens, self.prompts_per_shard, self.seed
        ]  # fmt: skip
        return hashlib.sha256(json.dumps([settings, facts]).encode()).hexdigest()[:16]


class StateRecorder(Drafter):
    """Drafts nothing and keeps the hidden states that the engine tells drafters of."""

    name = "recorder"
    needs_hidden = True

    def __init__(self) -> None:
        self._rows: dict[str, list[Tensor]] = {}

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        """Root-only trees."""
        return [DraftTree.root_only(step.root) for step in steps]

    def observe(self, request: Request, verdict: Verdict, hidden: Tensor | None) -> None:
        """Keep the rows."""
        assert hidden is not None
        self._rows.setdefault(request.request_id, []).append(hidden.bfloat16())

    def take(self, request: Request) -> Tensor:
        """The states that chose the request's output tokens, bf16 [num_outputs, hidden_size]."""
        return torch.cat(self._rows.pop(request.request_id))[: len(request.output)]


def collect(
    config: EngineConfig,
    plan: CollectionPlan,
    folder: Path,
    *,
    loaded: LoadedModel | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Run the plan into a folder; shards that are there already are not made again.

    Raises UsageError if the folder holds another plan's corpus.
    """
    recorder = StateRecorder()
    engine = Engine(config, loaded=loaded, drafter=recorder)
    _claim(folder, plan, engine)
    num_done = num_tokens = 0
    for first in range(0, len(plan.prompts), plan.prompts_per_shard):
        prompts = plan.prompts[first : first + plan.prompts_per_shard]
        path = folder / f"shard-{first // plan.prompts_per_shard:05d}.safetensors"
        if not path.exists():
            requests = list(_requests(engine, plan, prompts, first))
            for done, tokens in _run(engine, [request for _, request, _ in requests]):
                if on_progress is not None:
                    on_progress(num_done + done, num_tokens + tokens)
            answered = [
                TrainingSequence(
                    torch.tensor(request.token_ids, dtype=torch.int32),
                    len(request.prompt_ids),
                    recorder.take(request),
                    temperature,
                    prompt.task,
                )
                for prompt, request, temperature in requests
            ]
            if answered:
                write_shard(path, answered)
            num_tokens += sum(len(request.output) for _, request, _ in requests)
        num_done += len(prompts) * len(plan.temperatures)
        if on_progress is not None:
            on_progress(num_done, num_tokens)


def write_questions(
    engine: Engine, openings: Sequence[Opening], *, seed: int, on_progress: OnProgress | None = None
) -> list[Prompt]:
    """Let the target finish users' turns; empty and cut ones are left out."""
    marker = "\x00"
    chat = engine.tokenizer.render_chat(
        [{"role": "user", "content": marker}], add_generation_prompt=False
    )
    before, after = chat.split(marker)
    end = tuple(after.split()[:1])  # what the template writes after a user's turn, if anything
    requests = []
    for number, opening in enumerate(openings):
        params = SamplingParams(
            max_tokens=1 if opening.is_whole else 80,
            temperature=0.9,
            top_k=50,
            stop=end,
            seed=seed + number,
        )
        ids = engine.tokenizer.encode(before + opening.text)
        requests.append(Request(f"question-{number}", tuple(ids), params))
    written = [r for r, o in zip(requests, openings, strict=True) if not o.is_whole]
    for done, tokens in _run(engine, written):
        if on_progress is not None:
            on_progress(done, tokens)
    prompts = []
    for opening, request in zip(openings, requests, strict=True):
        text = opening.text
        if not opening.is_whole:
            text += engine.tokenizer.decode(request.output_ids)
        is_whole = opening.is_whole or request.finish_reason == "stop"
        if is_whole and text.strip():
            prompts.append(Prompt(opening.task, ({"role": "user", "content": text.strip()},)))
    return prompts


def _claim(folder: Path, plan: CollectionPlan, engine: Engine) -> None:
    """Write corpus.json, or check that it is of this plan."""
    shape = engine.loaded.model.config
    facts = {
        "plan": plan.fingerprint(engine.model_name),
        "model": engine.model_name,
        "weights": engine.config.weights,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_prompts": len(plan.prompts),
        "temperatures": list(plan.temperatures),
        "max_tokens": plan.max_tokens,
    }
    file = folder / "corpus.json"
    if file.exists():
        if json.loads(file.read_text(encoding="utf-8")).get("plan") != facts["plan"]:
            raise UsageError(f"{folder} holds a corpus of other prompts or settings; take another")
        return
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(facts, indent=1), encoding="utf-8")


def _requests(
    engine: Engine, plan: CollectionPlan, prompts: Sequence[Prompt], first: int
) -> Iterator[tuple[Prompt, Request, float]]:
    for number, prompt in enumerate(prompts, first):
        ids = tuple(engine.tokenizer.encode_chat(prompt.messages))
        if len(ids) + plan.max_tokens > engine.max_model_len:
            continue
        for temperature in plan.temperatures:
            params = SamplingParams(
                max_tokens=plan.max_tokens, temperature=temperature, seed=plan.seed + number
            )
            yield prompt, Request(f"{number}-{temperature}", ids, params), temperature


def _run(engine: Engine, requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
    """Run requests to their end; requests done and tokens so far, after each step."""
    for request in requests:
        engine.add(request)
    done = tokens = 0
    while engine.has_work:
        for output in engine.step():
            tokens += len(output.tokens)
            done += output.finish_reason is not None
        yield done, tokens
