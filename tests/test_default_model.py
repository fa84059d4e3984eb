"""The built-in model: the answers of transformers, and the same ones under every disturbance."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import checkpoints
from specdec.composition import BUDGETS
from specdec.config import DEFAULT_MODEL, Backend, EngineConfig
from specdec.drafters.pretrained import lookup
from specdec.drafting import Drafter
from specdec.engine import Engine
from specdec.errors import CheckpointError
from specdec.limits import DraftLimits
from specdec.loading import LoadedModel, load_model
from specdec.native_model import NativeModel
from specdec.params import SamplingParams
from specdec.plan import StepPlan
from specdec.request import Request
from specdec.tokenizer import Tokenizer
from tests.toy import TruthDrafter, check_pool

MAX_LEN = 256
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List the first ten prime numbers.",
    "Explain gravity to a child.",
    "Translate 'good morning' into Spanish.",
    "def fibonacci(n):\n    # complete this function",
    "Repeat after me: one two three one two three one two three",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What is 17 + 25?",
    "Summarise: The cat sat on the mat. The dog sat on the log. The cat and the dog are friends.",
    "Wie heißt du? 你好 🙂",
    'Return JSON with the keys "name" and "age".',
    "Why is the sky blue?",
    "Tell me a joke about computers.",
    "What are the pros and cons of working from home?",
    "Write a formal letter to a landlord about a broken window.",
    "x",
    "Count from 1 to 30, separated by commas.",
    "Name three countries in Africa and their capitals.",
)


@pytest.fixture(scope="module", autouse=True)
def _torch_threads() -> Iterator[None]:
    """Loading and `make_engine` set their number; what comes after this module wants its own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


PRETRAINED = Path(lookup.__file__).parent / DEFAULT_MODEL


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return checkpoints.resolve(DEFAULT_MODEL)
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["auto"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """The default one; a test may ask for others."""
    chosen: Backend = request.param
    return chosen


@pytest.fixture(scope="module")
def fp32_model(folder: Path, backend: Backend) -> LoadedModel:
    return load(folder, backend=backend, weights="fp32")


@pytest.fixture(scope="module")
def default_model(folder: Path, backend: Backend) -> LoadedModel:
    return load(folder, backend=backend)


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), max_model_len=MAX_LEN, **settings))


def chat_ids(model: LoadedModel, question: str, system: str | None = None) -> tuple[int, ...]:
    assert model.tokenizer is not None
    head = [] if system is None else [{"role": "system", "content": system}]
    return tuple(model.tokenizer.encode_chat([*head, {"role": "user", "content": question}]))


def make_engine(model: LoadedModel, drafter: Drafter | str, **settings: Any) -> Engine:
    settings = {"kv_memory_mib": 256, "control": "fixed", **settings}
    # PyTorch's bits hold for one number of threads; the native forward has threads of its own.
    torch.set_num_threads(1 if isinstance(model.model, NativeModel) else 2)
    if isinstance(drafter, str):
        return Engine(EngineConfig(drafter=drafter, **settings), loaded=model)
    return Engine(EngineConfig(**settings), loaded=model, drafter=drafter)


def smallest_kv_mib(model: LoadedModel) -> int:
    """A KV cache that holds one context of MAX_LEN tokens, and hardly more."""
    block_size = EngineConfig().block_size
    num_bytes = MAX_LEN // block_size * model.model.kv_bytes_per_block("auto", block_size)
    return -(-num_bytes // 2**20)


def run(engine: Engine, requests: Sequence[Request]) -> None:
    """Run requests that arrive together."""
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        check_pool(engine)


# --- against transformers ---


@pytest.fixture(scope="module")
def transformers_answers(folder: Path) -> list[list[int]]:
    """Greedy answers to QUESTIONS by `generate`, in fp32, each up to its end token."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    tokenizer = Tokenizer.load(folder)
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS
    ]
    (eos,) = tokenizer.eos_token_ids
    longest = max(map(len, prompts))
    ids = torch.tensor(
        [[eos] * (longest - len(p)) + list(p) for p in prompts]
    )  # [prompts, longest]
    is_prompt = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = model.generate(
        ids, attention_mask=is_prompt, do_sample=False, max_new_tokens=64, pad_token_id=eos
    )
    return [_up_to(eos, answer) for answer in answers[:, longest:].tolist()]


def _up_to(eos: int, token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(eos) + 1] if eos in token_ids else token_ids


@pytest.mark.parametrize(
    ("backend", "drafter"),
    [("auto", "none"), ("auto", "ngram"), ("torch", "ngram")],
    indirect=["backend"],
)
def test_greedy_answers_are_those_of_transformers(
    fp32_model: LoadedModel, transformers_answers: list[list[int]], drafter: str
) -> None:
    requests = [
        Request(f"r{index}", chat_ids(fp32_model, question), SamplingParams(max_tokens=64))
        for index, question in enumerate(QUESTIONS)
    ]
    run(make_engine(fp32_model, drafter), requests)
    different = [
        question
        for question, request, answer in zip(QUESTIONS, requests, transformers_answers, strict=True)
        if request.output_ids != answer
    ]
    assert different == []
    assert drafter == "none" or sum(r.stats.num_accepted for r in requests) > 100


# --- lossless in the default precision ---

SYSTEM = (
    "You are a careful assistant. You answer briefly, you say when you do not know, you never"
    " invent sources, and you write plain sentences without lists unless you are asked for one."
    " When somebody asks for code you give code first and one sentence after it."
)
# (question, system message, temperature, seed); two have a system message in common.
ASKED = (
    (QUESTIONS[2], None, 0.0, 1),
    (QUESTIONS[6], None, 0.0, 2),
    (QUESTIONS[18], None, 1.0, 3),
    (QUESTIONS[10], None, 1.0, 4),
    (QUESTIONS[3], SYSTEM, 0.0, 5),
    (QUESTIONS[14], None, 1.0, 6),
    (QUESTIONS[15], SYSTEM, 1.0, 7),
    (QUESTIONS[5], SYSTEM, 0.0, 8),
)
Answers = dict[str, list[int]]


def asked(model: LoadedModel) -> list[Request]:
    """The requests, new."""
    return [
        Request(
            f"r{index}",
            chat_ids(model, question, system),
            SamplingParams(max_tokens=40, temperature=temperature, seed=seed),
        )
        for index, (question, system, temperature, seed) in enumerate(ASKED)
    ]


@pytest.fixture(scope="module")
def plain(default_model: LoadedModel) -> Answers:
    """The oracle: each request alone, without drafts, chunks or prefix hits."""
    engine = make_engine(default_model, "none", prefix_cache=False)
    requests = asked(default_model)
    for request in requests:
        run(engine, [request])
    assert {request.finish_reason for request in requests} <= {"stop", "length"}
    return {request.request_id: request.output_ids for request in requests}


def drafter_named(name: str, plain: Answers, model: LoadedModel) -> Drafter | str:
    if name != "truth":  # the model is named by its folder here, so its drafters are, too
        for own in ("medusa", "small-model"):
            name = name.replace(own, f"{own}={PRETRAINED / own}")
        return name
    return TruthDrafter(plain, 5, hit_rate=0.5, vocab_size=model.model.config.vocab_size)


@pytest.mark.parametrize(
    ("drafter", "control"),
    [
        *itertools.product(["ngram", "truth", "suffix,medusa", "small-model"], ["fixed"]),
        *itertools.product(["truth", "suffix,medusa", "suffix,small-model"], ["adaptive"]),
    ],
)
def test_alone(default_model: LoadedModel, plain: Answers, drafter: str, control: str) -> None:
    drafts = drafter_named(drafter, plain, default_model)
    engine = make_engine(default_model, drafts, control=control)
    requests = asked(default_model)
    for request in requests:
        run(engine, [request])
    assert {r.request_id: r.output_ids for r in requests} == plain
    assert requests[6].num_prefix_hit >= 32, "the system message was computed before"
    assert sum(r.stats.num_accepted for r in requests) > 20


@pytest.mark.parametrize(
    ("backend", "drafter", "is_small", "control"),
    [
        *itertools.product(["auto"], ["none", "ngram", "truth"], [False, True], ["fixed"]),
        ("auto", "prediction,suffix,medusa,small-model", False, "fixed"),
        ("auto", "prediction,suffix,medusa,small-model", False, "adaptive"),
        ("auto", "truth", True, "adaptive"),
        ("torch", "truth", True, "fixed"),
    ],
    indirect=["backend"],
)
def test_together(
    default_model: LoadedModel, plain: Answers, drafter: str, is_small: bool, control: str
) -> None:
    """Chunked prompts, prefix hits, an abort, and in the smallest KV cache also preemption."""
    engine = make_engine(
        default_model,
        drafter_named(drafter, plain, default_model),
        control=control,
        node_budget=4 if is_small else 16,  # slow, so that many want blocks
        token_budget=48,
        kv_memory_mib=smallest_kv_mib(default_model) if is_small else 256,
    )
    requests = asked(default_model)
    gone = requests[3]
    late = 0 if is_small else 9  # late enough to find the system message in the prefix cache
    arrivals = [*[0] * 5, *[late] * 3]
    plans = recorded_plans(engine)
    step = 0
    while engine.has_work or step <= late:
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival == step:
                engine.add(request)
        if len(gone.output) >= 10:
            engine.abort(gone.request_id)
        engine.step()
        check_pool(engine)
        step += 1
    num_preempted = sum(len(plan.preempted) for plan in plans)
    assert gone.finish_reason == "abort"
    for request in requests:
        expected = plain[request.request_id]
        assert request.output_ids == expected[: len(request.output)], request.request_id
        assert request is gone or len(request.output) == len(expected)
    assert any(chunk.start > 0 for plan in plans for chunk in plan.prefill_chunks)
    assert (num_preempted > 0) == is_small
    if not is_small:
        assert requests[7].num_prefix_hit >= 32
    assert drafter == "none" or sum(r.stats.num_accepted for r in requests) > 10


def recorded_plans(engine: Engine) -> list[StepPlan]:
    """Every plan the engine will make."""
    plans: list[StepPlan] = []
    make_plan = engine.scheduler.plan

    def plan(limits: Mapping[str, DraftLimits]) -> StepPlan:
        plans.append(make_plan(limits))
        return plans[-1]

    engine.scheduler.plan = plan  # type: ignore[method-assign]  # a spy
    return plans


def test_without_options_it_chooses_for_itself(folder: Path) -> None:
    """What was measured of medusa is told, and answers are those of plain decoding."""
    engine = Engine(EngineConfig(max_model_len=MAX_LEN, kv_memory_mib=256))
    chosen = engine.config
    drafters = chosen.drafter.split(",")
    assert drafters in (["prediction", "suffix"], ["prediction", "suffix", "medusa"])
    assert [drafter.name for drafter in engine.drafter.drafters] == drafters
    assert chosen.node_budget in BUDGETS and chosen.weights == engine.loaded.model.precision
    if isinstance(engine.loaded.model, NativeModel):
        assert re.fullmatch(
            r"(int4 weights, which the checkpoint was made from|bf16 weights): \d+\.\d ms a step, "
            r"(bf16|int4) \d+\.\d; drafter \S+, medusa (gives|would give) \d+\.\d\dx; "
            r"at most \d+ nodes a step",
            engine.reason,
        )
    plain = make_engine(engine.loaded, "none")
    for request, same in zip(asked(engine.loaded), asked(engine.loaded), strict=True):
        run(engine, [request])
        run(plain, [same])
        assert request.output_ids == same.output_ids
