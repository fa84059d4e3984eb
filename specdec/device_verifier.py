"""DeviceVerifier: choice and tree walk where the logits are; the host reads what was accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.commit import VerifiedStep
from specdec.host_verifier import broken_step, verify_step
from specdec.kernels.batch import Batch
from specdec.kernels.gumbel_argmax import gumbel_argmax
from specdec.kernels.row_sampling import RowSampling
from specdec.kernels.transfer import to_device
from specdec.kernels.tree_walk import TreeWalk, tree_walk
from specdec.kernels.truncation import thresholds
from specdec.params import SamplingParams
from specdec.plan import DecodeStep, StepPlan
from specdec.request import Request
from specdec.sampling import Sampler
from specdec.tree import ROOT_SOURCE, DraftTree
from specdec.verification import Verdict, records


class DeviceVerifier:
    """The coupled rule as kernels: one synchronisation per step, when the verdicts are read.

    Requests whose penalties, bias or bans change their logits are verified on the host instead,
    from a copy of their rows. Both give the same tokens.
    """

    def verify(
        self,
        plan: StepPlan,
        trees: Sequence[DraftTree],
        logits: Tensor,
        batch: Batch,
        samplers: Mapping[str, Sampler],
    ) -> list[VerifiedStep]:
        """See Verifier."""
        if not trees:
            return []
        steps = plan.decode_steps
        own = [samplers[step.request.request_id] for step in steps]
        walk = _read(_walk(steps, trees, own, logits, batch.first_logit))
        verified = []
        for index, (step, tree, sampler) in enumerate(zip(steps, trees, own, strict=True)):
            first, last = batch.first_logit[index : index + 2]
            rows = logits[first:last]
            if not int(walk.is_finite[index]):
                verified.append(broken_step(step, tree))
            elif sampler.changes_logits(len(step.request.output)):
                verified.append(verify_step("coupled", step, tree, rows.cpu(), sampler))
            else:
                verified.append(_verified(step, tree, rows, walk, index))
        return verified

    def warm_up(self, logits: Tensor) -> None:
        """See Verifier: compiles the kernels, or the first request would wait for it."""
        params = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, seed=0)
        request = Request("warm-up", (0,), params)
        sampler = Sampler(request.params, request.prompt_ids, seed=0, eos_token_ids=())
        _walk([DecodeStep(request, 0)], [DraftTree.root_only(0)], [sampler], logits, (0, 1))


def _walk(
    steps: Sequence[DecodeStep],
    trees: Sequence[DraftTree],
    samplers: Sequence[Sampler],
    logits: Tensor,
    first_logit: Sequence[int],
) -> TreeWalk:
    """Launch the kernels; nothing is waited for."""
    sampling, token_ids, parents = _rows(steps, trees, samplers, logits.device)
    if any(sampler.truncates for sampler in samplers):
        least = thresholds(logits, sampling)
    else:  # many launches for nothing
        least = torch.full((len(logits),), -torch.inf, device=logits.device)
    choices, is_finite = gumbel_argmax(logits, sampling, least)
    first_node = to_device(torch.tensor(first_logit, dtype=torch.int32), logits.device)
    longest = max(max(tree.depths) for tree in trees)
    return tree_walk(choices, is_finite, token_ids, parents, first_node, longest)


def _rows(
    steps: Sequence[DecodeStep],
    trees: Sequence[DraftTree],
    samplers: Sequence[Sampler],
    device: torch.device,
) -> tuple[RowSampling, Tensor, Tensor]:
    """Per node: how it is sampled, its token and its parent. One copy for the 32-bit columns."""
    num_nodes = sum(tree.num_nodes for tree in trees)
    width = -(-num_nodes // 4) * 4  # aligned rows: Triton compiles anew for those that are not
    columns = np.zeros((7, width), dtype=np.int32)
    real = columns.view(np.float32)
    seeds = np.zeros(num_nodes, dtype=np.uint64)
    end = 0
    for step, tree, sampler in zip(steps, trees, samplers, strict=True):
        nodes = slice(end, end := end + tree.num_nodes)
        params = sampler.params
        seeds[nodes] = sampler.seed
        columns[0, nodes] = tree.token_ids
        columns[1, nodes] = tree.parents
        columns[2, nodes] = sampler.position(step.request.output_ids) + np.array(tree.depths)
        columns[3, nodes] = min(params.top_k, 2**31 - 1)
        real[4, nodes] = sampler.inverse_temperature
        real[5, nodes] = params.top_p
        real[6, nodes] = params.min_p
    on_device = to_device(torch.from_numpy(columns), device)[:, :num_nodes]
    as_real = on_device.view(torch.float32)
    sampling = RowSampling(
        seeds=to_device(torch.from_numpy(seeds.view(np.int64)), device),
        positions=on_device[2],
        inverse_temperature=as_real[4],
        top_k=on_device[3],
        top_p=as_real[5],
        min_p=as_real[6],
    )
    return sampling, on_device[0], on_device[1]


def _read(walk: TreeWalk) -> TreeWalk:
    """The step's one wait: the verdicts on the host."""
    if walk.buffer.device.type == "cpu":
        return walk
    host = torch.empty(walk.buffer.shape, dtype=torch.int32, pin_memory=True)
    host.copy_(walk.buffer, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    return TreeWalk(host)


def _verified(
    step: DecodeStep, tree: DraftTree, logits: Tensor, walk: TreeWalk, index: int
) -> VerifiedStep:
    num_accepted = int(walk.num_accepted[index])
    path = tuple(walk.path[index, :num_accepted].tolist())
    token_ids = tuple(walk.tokens[index, : num_accepted + 1].tolist())
    sources = (*(tree.sources[node] for node in path), (ROOT_SOURCE,))
    verdict = Verdict(path, token_ids, sources)
    stats, params = step.request.stats, step.request.params
    tokens = records(verdict, logits, step=stats.num_steps, num_logprobs=params.logprobs)
    return VerifiedStep(step, tree, verdict, tuple(tokens))
