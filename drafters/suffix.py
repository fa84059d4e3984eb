"""SuffixDrafter: goes on as the longest repeated suffix of the text did, branching by frequency."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Self

from specdec.drafters.suffix_automaton import NONE, ROOT, SuffixAutomaton, SuffixMatch
from specdec.drafters.suffix_pool import PoolMatch, SuffixPool
from specdec.drafting import DraftContext, Drafter
from specdec.limits import MAX_NODE_BUDGET
from specdec.loading import LoadedModel
from specdec.plan import DecodeStep
from specdec.request import Request
from specdec.tree import ROOT_SOURCE, DraftTree

DOUBT = 2.0  # length of a match at which half of what was seen once is believed; see `follow`
# On a CPU a row more costs 3 % of a step: where a step yields two tokens, a node pays from a reach
# of 0.06 on.
MIN_REACH = 0.05
MAX_SUMMED = 4  # followers whose counts are added up
MAX_ENTERED = 4096  # tokens of long prompts entered per draft, 10 ms: no stream waits for another's
POOL_ENTERED = 512  # tokens of finished texts entered per draft: more than a step finishes

_SOURCE = ("suffix",)


class SuffixDrafter(Drafter):
    """Guesses that a text goes on as it did where its last tokens occurred before.

    Each request has a suffix automaton of its prompt and output. With a pool, the finished
    requests of the same `cache_salt` are looked up too. Costs per step do not depend on the
    length of the context, but a long prompt is entered over several drafts, root only until then.

    Example: `--drafter suffix` has no pool; `--drafter suffix=pool.safetensors` keeps one in that
    file, read at the start if it exists and written by `close`.
    """

    name = "suffix"

    @classmethod
    def suits(cls, target: LoadedModel) -> bool:
        """Any: it needs nothing but tokens."""
        return True

    def __init__(self, pool: SuffixPool | None = None, file: Path | None = None) -> None:
        self._pool, self._file = pool, file
        self._texts: dict[str, _Text] = {}
        self.num_bytes = pool.max_bytes if pool else 0

    @classmethod
    def load(cls, context: DraftContext) -> Self:
        """A drafter, with a pool where a file is named. Raises UsageError or CheckpointError."""
        if context.checkpoint is None:
            return cls()
        file = Path(context.checkpoint).expanduser()
        vocab_size = context.target.model.config.vocab_size
        return cls(SuffixPool.open(file, vocab_size=vocab_size), file)

    def admit(self, request: Request) -> None:
        """Start with an empty text; it is entered when drafts are due."""
        match = self._pool.match(request.cache_salt) if self._pool else None
        self._texts[request.request_id] = _Text(request, match)

    def draft(self, steps: Sequence[DecodeStep]) -> list[DraftTree]:
        """One tree per step, root-only where nothing matches."""
        room = MAX_ENTERED
        trees = []
        for step in steps:
            text = self._texts[step.request.request_id]
            # At least what a step can commit, so that no request falls behind for ever.
            room -= text.enter(max(room, MAX_NODE_BUDGET + 1))
            matches = text.matches() if step.node_budget else ()
            trees.append(grow(step.root, step.node_budget, matches))
        if self._pool:
            self._pool.enter(POOL_ENTERED)
        return trees

    def release(self, request: Request) -> None:
        """Forget a request; what ended by itself or by its length is offered to the pool."""
        text = self._texts.pop(request.request_id, None)
        if text and self._pool and request.finish_reason in ("stop", "length"):
            self._pool.add(request.cache_salt, request.token_ids)

    def num_waiting(self, request: Request) -> int:
        """Tokens of a request that are still to be entered: until then it drafts the root only."""
        return request.num_tokens - self._texts[request.request_id].num_entered

    def text_bytes(self, request: Request) -> int:
        """Memory that a request's own automaton takes, at most."""
        return self._texts[request.request_id].automaton.num_bytes

    def close(self) -> None:
        """Write the pool to its file. Raises UsageError if that fails."""
        if self._pool and self._file:
            self._pool.save(self._file)


class _Text:
    """A request's tokens in an automaton of their own, and their match in the tenant's pool."""

    def __init__(self, request: Request, pool_match: PoolMatch | None) -> None:
        self._request = request
        self._pool_match = pool_match
        self.automaton = SuffixAutomaton()
        self.num_entered = 0

    def enter(self, limit: int) -> int:
        """Enter at most `limit` tokens that are known by now; returns how many."""
        new = self._request.token_ids[self.num_entered : self.num_entered + limit]
        self.automaton.extend(new)
        self.num_entered += len(new)
        return len(new)

    def matches(self) -> Sequence[SuffixMatch]:
        """Where the text's end occurs, own text first; nothing while tokens wait to be entered."""
        if self.num_entered < self._request.num_tokens:
            return ()
        own = self.automaton.repeated()
        if self._pool_match is None:
            return (own,)
        return (own, *self._pool_match.follow(self._request.token_ids))


def grow(root: int, node_budget: int, matches: Sequence[SuffixMatch]) -> DraftTree:
    """The tree of the likeliest continuations of all matches, best first.

    A node's reach is the product of the scores from the root to it; none below `MIN_REACH` is
    drafted, so that what `length` tokens saw once is drafted for about 3.5 x `length` tokens. Where
    matches guess the same, the likelier guess counts, that of the first match if they are equal.
    """
    heap: list[_Guess] = []
    num_guesses = 0
    tokens, parents, scores, reaches = [root], [-1], [1.0], [1.0]
    node_of: dict[tuple[int, int], int] = {}
    can_meet = len(matches) > 1
    node = 0
    places = [(match.automaton, match.state, match.length) for match in matches]
    while True:
        reach = reaches[node]
        for automaton, state, length in places:
            for score, token_id, after, longer in follow(automaton, state, length, reach):
                num_guesses += 1
                heappush(
                    heap,
                    (-reach * score, num_guesses, node, token_id, score, automaton, after, longer),
                )
        if not heap:
            break
        reach, _, parent, token_id, score, automaton, state, length = heappop(heap)
        places = [(automaton, state, length)]
        node = node_of.get((parent, token_id), 0) if can_meet else 0
        if node == 0:
            node = len(tokens)
            if node > node_budget:
                break
            tokens.append(token_id)
            parents.append(parent)
            scores.append(score)
            reaches.append(-reach)
            if can_meet:
                node_of[parent, token_id] = node
    sources = ((ROOT_SOURCE,), *(_SOURCE,) * (len(tokens) - 1))
    return DraftTree.depth_first(tokens, parents, scores, sources)


# Minus the reach, order of arrival, parent, token, score; the automaton, its state after the token,
# and how many tokens match there.
_Guess = tuple[float, int, int, int, float, SuffixAutomaton, int, int]


def follow(
    automaton: SuffixAutomaton, state: int, length: int, reach: float = 1.0
) -> list[tuple[float, int, int, int]]:
    """(score, token, state after it, tokens matched there) of the guesses worth `MIN_REACH`.

    Of n times that the `length` matched tokens went on, c went on with a token: its score is
    (c - d) / n. The discount d = 2 / (2 + length) was measured: greedy outputs of a small model for
    chats, summaries, translations and edits went on as the only occurrence of a match of length
    1, 2, 4, 8, 16, 32 had with probability 0.38, 0.57, 0.71, 0.81, 0.91, 0.96; sampled ones and
    source text less often (0.27, 0.37, 0.54, 0.70, 0.81, 0.86). What discounts leave over goes to
    tokens that followed the next shorter match only, as in prediction by partial matching (Cleary
    and Witten 1984) with absolute discounting (Ney et al. 1994).
    """
    links, lengths, counts = automaton.links, automaton.lengths, automaton.counts
    followers = automaton.followers(state)
    while state != ROOT and not followers:  # a text ends here; it goes on as a shorter match does
        state = links[state]
        length = lengths[state]
        followers = automaton.followers(state)
    if state == ROOT:
        return []
    doubt = DOUBT / (DOUBT + length)
    if len(followers) == 1:
        ((token_id, after),) = followers
        escape = doubt / counts[after]
        guesses = [(1.0 - escape, token_id, after, length + 1)]
        if reach * (1.0 - escape) < MIN_REACH:
            guesses.clear()
    else:
        total = _total(automaton, state, followers)
        escape = min(1.0, doubt * len(followers) / total)
        least = doubt + MIN_REACH * total / reach
        guesses = [
            (min(1.0, (counts[after] - doubt) / total), token_id, after, length + 1)
            for token_id, after in followers
            if counts[after] >= least
        ]
    shorter = links[state]
    if shorter == ROOT or reach * escape < MIN_REACH:
        return guesses
    length = lengths[shorter]
    doubt = DOUBT / (DOUBT + length)
    followers = automaton.followers(shorter)
    total = _total(automaton, shorter, followers)
    least = doubt + MIN_REACH * total / (reach * escape)
    for token_id, after in followers:
        if counts[after] >= least and automaton.step(state, token_id) == NONE:
            score = min(1.0, escape * (counts[after] - doubt) / total)
            guesses.append((score, token_id, after, length + 1))
    return guesses


def _total(automaton: SuffixAutomaton, state: int, followers: Collection[tuple[int, int]]) -> int:
    """How often a state's substrings went on: of many followers the occurrences, ends included."""
    counts = automaton.counts
    if len(followers) > MAX_SUMMED:
        return counts[state]
    return sum([counts[after] for _, after in followers])
