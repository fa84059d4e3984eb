"""Engine: one loop that drafts, verifies and commits for all requests at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec import cost_cache
from specdec.adaptive import AdaptiveController
from specdec.block_pool import BlockPool
from specdec.commit import Committer, StepOutcome, VerifiedStep
from specdec.composite import CompositeDrafter
from specdec.composition import compose
from specdec.config import AUTO, EngineConfig
from specdec.controller import Controller, FixedBudget
from specdec.cost_profile import measured_cost
from specdec.counters import EngineCounters
from specdec.decision import Reason, StepTimes
from specdec.drafting import DraftContext, Drafter, check_drafters
from specdec.errors import ContextLengthExceeded, InvalidRequest
from specdec.limits import DEFAULT_NODE_BUDGET
from specdec.loading import LoadedModel, load_model, make_kv_cache
from specdec.model_runner import ModelRunner
from specdec.out_of_memory import OUT_OF_MEMORY, is_out_of_memory
from specdec.plan import StepPlan
from specdec.request import RejectedNode, Request, RequestOutput, TokenRecord
from specdec.sampling import Sampler
from specdec.scheduler import Scheduler
from specdec.step_cost import StepCost
from specdec.step_record import StepRecord
from specdec.text import StopMatcher
from specdec.tokenizer import Tokenizer
from specdec.tree import DraftTree
from specdec.verifier import make_verifier


class Engine:
    """Serves many requests with one target model; `step` is the whole loop.

    Every accepted request ends with exactly one output that has a finish reason.

    Example:
        engine = Engine(EngineConfig(drafter="suffix,medusa"))
        engine.add(Request("r1", tuple(engine.tokenizer.encode("Once upon")), SamplingParams()))
        while engine.has_work:
            for output in engine.step():
                print(output.tokens)

    `loaded`, `drafter` and `controller` replace what the configuration names, for tests and for
    experiments. `config` is what the engine runs with: what the configuration left open is settled,
    and `reason` says in a line how and why; "" where nothing was open.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        loaded: LoadedModel | None = None,
        drafter: Drafter | None = None,
        controller: Controller | None = None,
    ) -> None:
        if drafter is None:
            check_drafters(config.drafter)  # a wrong name is told before a model is loaded
        self.loaded = loaded or load_model(config)
        is_open = drafter is None and config.drafter == AUTO
        config = replace(config, weights=self.loaded.model.precision)
        if drafter is None:
            drafter = CompositeDrafter.load(DraftContext(self.loaded, config))
        elif not isinstance(drafter, CompositeDrafter):
            drafter = CompositeDrafter([drafter], vocab_size=self.vocab_size)
        if config.verification != "coupled":
            for one in drafter.drafters:
                one.uses_noise = False  # other rules draw with that noise after a rejection
        model = self.loaded.model
        kv_cache = make_kv_cache(
            config, model, self.loaded.max_model_len, num_reserved_bytes=drafter.num_bytes
        )
        self.runner = ModelRunner(model, kv_cache)
        most = DEFAULT_NODE_BUDGET if config.node_budget is None else config.node_budget
        self.runner.warm_up(most, config.token_budget)
        cost = None
        if controller is None and config.control == "adaptive" and config.node_budget != 0:
            cost = measured_cost(self.loaded, self.runner, config)
        composition = compose(
            drafter.drafters,
            cost,
            hidden_size=model.config.hidden_size,
            is_open=is_open,
            node_budget=config.node_budget,
            identity=cost_cache.identity(self.loaded, config),
        )
        if is_open:
            drafter = CompositeDrafter(composition.drafters, vocab_size=self.vocab_size)
            config = replace(config, drafter=composition.names)
        self.drafter = drafter
        self.config = replace(config, node_budget=composition.node_budget)
        self.reason = "; ".join(filter(None, (self.loaded.reason, composition.reason)))
        self.pool = BlockPool(
            kv_cache.num_blocks, config.block_size, prefix_cache=config.prefix_cache
        )
        self.scheduler = Scheduler(
            self.pool,
            token_budget=config.token_budget,
            max_running=config.max_running,
            max_model_len=self.loaded.max_model_len,
        )
        self.controller = controller or self._make_controller(cost, composition.node_budget)
        self._verifier = make_verifier(config.verification, kv_cache.device)
        self._verifier.warm_up(
            torch.zeros(1, self.vocab_size, dtype=model.logits_dtype, device=model.device)
        )
        self._committer = Committer(self.scheduler, kv_cache, self.loaded.eos_token_ids)
        self._samplers: dict[str, Sampler] = {}
        self._requests: dict[str, Request] = {}
        self._aborted: list[RequestOutput] = []
        self._counters = EngineCounters()
        self._reasons_before: Counter[Reason] = Counter()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; InvalidRequest for a model without text."""
        if self.loaded.tokenizer is None:
            raise InvalidRequest("this model has no tokenizer; use token ids")
        return self.loaded.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens, prompt and output."""
        return self.loaded.max_model_len

    @property
    def vocab_size(self) -> int:
        """Rows of the model's head, padding included."""
        return self.loaded.model.config.vocab_size

    @property
    def model_name(self) -> str:
        """The name the model was loaded by."""
        return self.loaded.name

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._requests or self._aborted)

    def add(self, request: Request) -> None:
        """Accept a request, or raise InvalidRequest and forget it."""
        limit = self.max_model_len
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if len(request.prompt_ids) >= limit:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.prompt_ids)} tokens; "
                f"the context holds {limit}, one of them for output",
                param="prompt",
            )
        vocab_size = self.vocab_size
        for param, ids in (("prompt", request.prompt_ids), ("prediction", request.prediction_ids)):
            if not all(0 <= token_id < vocab_size for token_id in ids):
                raise InvalidRequest(
                    f"{param} token ids must be between 0 and {vocab_size - 1}", param=param
                )
        request.params.check_vocab(vocab_size)
        request.max_output = min(request.max_output, limit - len(request.prompt_ids))
        if request.params.stop:
            request.stop_matcher = StopMatcher(
                self.tokenizer,
                request.params.stop,
                min_tokens=request.params.min_tokens,
                skip_special_tokens=request.params.skip_special_tokens,
            )
        self._samplers[request.request_id] = Sampler(
            request.params,
            request.prompt_ids,
            seed=request.seed,
            eos_token_ids=self.loaded.eos_token_ids,
        )
        self._requests[request.request_id] = request
        if not request.is_shadow:
            self.drafter.admit(request)
            self._counters.observe_add(request)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request now; its last output comes with the next step. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            request.finish("abort")
            self._forget(request)
            self._aborted.append(_last_output(request, ()))

    def step(self) -> list[RequestOutput]:
        """One target forward for everything that runs."""
        outputs, self._aborted = self._aborted, []
        started = time.perf_counter()
        plan = self.scheduler.plan(self.controller.limits(self.scheduler.requests))
        if plan.is_empty:
            return outputs
        self._counters.observe_plan(plan)
        candidates = self.drafter.draft(plan.decode_steps)
        trees = candidates if plan.is_shadow else self.controller.choose(plan, candidates)
        packing = time.perf_counter()
        try:
            batch = self.runner.pack(plan, trees)
            target = self.runner.forward(batch)
            verified = self._verifier.verify(plan, trees, target.logits, batch, self._samplers)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return outputs + self._fail(plan)  # nothing of the step is committed yet
        forward_s = time.perf_counter() - packing
        outcome = self._committer.commit(plan, verified)
        outputs += self._report(outcome, verified, target.hidden, batch.first_logit)
        _keep_records(candidates, verified, outcome)
        if plan.is_shadow:
            return outputs  # plain steps: they would blur what is counted and learned
        draft_s = dict(self.drafter.asked_s)
        rest_s = time.perf_counter() - started - forward_s - sum(draft_s.values())
        times = StepTimes(forward_s, rest_s, draft_s, dict(self.drafter.num_asked))
        self.controller.observe(verified, times)
        self._counters.observe_step(verified, outcome, times)
        return outputs

    def count(self) -> dict[str, Any]:
        """What the engine has done so far (`totals`) and holds now (`now`), ready for JSON.

        `instance` tells it from an engine that takes its place. Keys: EngineCounters.totals.
        Example: `engine.count()["totals"]["num_steps"]`.
        """
        reasons = self.controller.reasons - self._reasons_before
        requests = [request for request in self._requests.values() if not request.is_shadow]
        return {
            "instance": self._counters.instance,
            "totals": {
                **self._counters.totals(requests),
                "reasons": {reason.value: count for reason, count in reasons.items()},
                "faults": dict(self.drafter.num_faults),
            },
            "now": {
                "num_running": sum(not r.is_shadow for r in self.scheduler.running),
                "num_waiting": sum(not r.is_shadow for r in self.scheduler.waiting),
                "num_blocks": self.pool.num_blocks,
                "num_held_blocks": self.pool.num_blocks - self.pool.num_free,
            },
        }

    def forget_counts(self) -> None:
        """Count anew: what came before was a test, which says nothing about who is served."""
        self._counters = EngineCounters()
        self._reasons_before = self.controller.reasons.copy()

    def close(self) -> None:
        """Let drafters write what should outlive the engine."""
        self.drafter.close()

    def _fail(self, plan: StepPlan) -> list[RequestOutput]:
        """End the requests of a step for which there was no memory; others may need less."""
        computed = [chunk.request for chunk in plan.prefill_chunks]
        computed += [step.request for step in plan.decode_steps]
        requests = {request.request_id: request for request in computed}
        for request in requests.values():
            self._committer.fail(request, OUT_OF_MEMORY)
            self._forget(request)
        return [_last_output(request, ()) for request in requests.values()]

    def _report(
        self,
        outcome: StepOutcome,
        verified: Sequence[VerifiedStep],
        hidden: Tensor,
        first_logit: Sequence[int],
    ) -> list[RequestOutput]:
        """Tell drafters and callers what was committed; let go of what has finished."""
        for item, first in zip(verified, first_logit[:-1], strict=True):
            if item.error is not None or item.step.request.is_shadow:
                continue
            rows = None
            if self.drafter.needs_hidden:
                rows = hidden[[first + node for node in item.verdict.rows]].float()
            self.drafter.observe(item.step.request, item.verdict, rows)
        outputs = []
        for item, (request, tokens) in zip(verified, outcome.tokens, strict=True):
            rejected = item.rejected(len(tokens)) if request.keeps_rejected and tokens else ()
            if request.is_finished:
                self._forget(request)
                outputs.append(_last_output(request, tokens, rejected))
            else:
                outputs.append(
                    RequestOutput(
                        request.request_id,
                        tokens,
                        num_prefix_hit=request.num_prefix_hit,
                        rejected=rejected,
                    )
                )
        return outputs

    def _make_controller(self, cost: StepCost | None, node_budget: int) -> Controller:
        if cost is None:
            return FixedBudget(node_budget)
        drafters = self.drafter.drafters
        return AdaptiveController(
            cost,
            [drafter.name for drafter in drafters],
            node_budget=node_budget,
            latency_weight=self.config.latency_weight,
            sequential=[drafter.name for drafter in drafters if drafter.is_sequential],
        )

    def _forget(self, request: Request) -> None:
        self.scheduler.remove(request)
        if not request.is_shadow:
            self._counters.observe_finish(request)
            self.drafter.release(request)
        self.controller.release(request)
        del self._requests[request.request_id], self._samplers[request.request_id]


def _keep_records(
    candidates: Sequence[DraftTree], verified: Sequence[VerifiedStep], outcome: StepOutcome
) -> None:
    """Note the step in the requests that keep their steps."""
    for offered, item, (request, tokens) in zip(candidates, verified, outcome.tokens, strict=True):
        if request.keeps_steps and item.error is None:
            request.steps.append(StepRecord.of(offered, item.tree, item.verdict.path, len(tokens)))


def _last_output(
    request: Request, tokens: tuple[TokenRecord, ...], rejected: tuple[RejectedNode, ...] = ()
) -> RequestOutput:
    return RequestOutput(
        request.request_id,
        tokens,
        request.finish_reason,
        request.error,
        request.stats,
        request.num_prefix_hit,
        rejected,
        request.error_kind,
    )
