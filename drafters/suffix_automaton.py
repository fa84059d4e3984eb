"""SuffixAutomaton: every substring of growing texts, how often it occurs, and what follows it."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from itertools import islice

ROOT = 0  # the state of the empty string
NONE, MANY = -1, -2  # in place of a state: no transition; several, which lie in a dict
MAX_COUNTED = 8  # suffixes counted per token, longest first; see `append`
MAX_FOLLOWERS = 16  # tokens looked at after a state; see `followers`

EMPTY_BYTES = 1024
STATE_BYTES = 24  # five 4-byte numbers, with the room that arrays leave for growth
BRANCH_BYTES = 230  # an empty dict, with its place in the dict of dicts
TRANSITION_BYTES = 124  # its share of a dict that has just grown, and two numbers


class SuffixAutomaton:
    """The smallest automaton of all substrings of one or several texts, grown token by token.

    A state stands for substrings that end at the same places; `lengths[s]` is the length of the
    longest, `counts[s]` the number of those places, and `links[s]` the state of its longest suffix
    that ends at more. A token costs amortised constant time, whatever the length of the text
    (Blumer et al. 1985; several texts: Mohri et al. 2009); one that ends a long repetition pays
    for all of it.

    Most states have one transition, kept in two arrays; only states where texts part have a dict.

    Example: after `extend([7, 8, 9, 7, 8])` the longest suffix seen before is [7, 8]:
    `automaton.links[automaton.last]` has length 2 and count 2, and its one follower is 9.
    """

    def __init__(self) -> None:
        self.lengths = array("i", [0])
        self.links = array("i", [NONE])
        self.counts = array("i", [0])
        self._tokens = array("i", [NONE])  # the only transition: its token and where it leads
        self._targets = array("i", [NONE])
        self._branches: dict[int, dict[int, int]] = {}
        self._num_branched = 0  # transitions in them
        self.last = ROOT  # the state of the whole text since `begin`

    @property
    def num_states(self) -> int:
        """The root included; less than two per token."""
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        """Memory it takes, at most."""
        return (
            EMPTY_BYTES
            + len(self.lengths) * STATE_BYTES
            + len(self._branches) * BRANCH_BYTES
            + self._num_branched * TRANSITION_BYTES
        )

    def begin(self) -> None:
        """What is appended next is a text of its own: nothing in it follows on from before."""
        self.last = ROOT

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens in order."""
        append = self.append
        for token_id in token_ids:
            append(token_id)

    def append(self, token_id: int) -> None:
        """Append one token.

        Of the suffixes that now occur once more, the `MAX_COUNTED` longest classes are counted: a
        repetition has as many as tokens, and 99.8 % of the tokens of source text have no more.
        """
        lengths, links, counts = self.lengths, self.links, self.counts
        targets, tokens, branches = self._targets, self._tokens, self._branches
        previous = self.last
        new = len(lengths)
        found = NONE
        state = previous
        while state >= 0:
            target = targets[state]
            if target == NONE:
                tokens[state], targets[state] = token_id, new
            elif target != MANY:
                if tokens[state] == token_id:
                    found = target
                    break
                branches[state] = {tokens[state]: target, token_id: new}
                targets[state] = MANY
                self._num_branched += 2
            else:
                followers = branches[state]
                found = followers.get(token_id, NONE)
                if found >= 0:
                    break
                followers[token_id] = new
                self._num_branched += 1
            state = links[state]
        if state != previous:
            lengths.append(lengths[previous] + 1)
            links.append(ROOT)
            counts.append(0)
            tokens.append(NONE)
            targets.append(NONE)
        if found >= 0 and lengths[found] != lengths[state] + 1:
            found = self._split(state, token_id, found)
        if state == previous:  # another text went on so before: one more occurrence, no new state
            new = found
        elif found >= 0:
            links[new] = found
        self.last = state = new
        for _ in range(MAX_COUNTED):
            counts[state] += 1
            state = links[state]
            if state <= ROOT:
                break

    def _split(self, state: int, token_id: int, old: int) -> int:
        """Give those substrings of `old` that end more often a state of their own; return it.

        They are the string of `state` and `token_id`, and its suffixes in `old`.
        """
        lengths, links, targets, tokens = self.lengths, self.links, self._targets, self._tokens
        branches = self._branches
        new = len(lengths)
        lengths.append(lengths[state] + 1)
        links.append(links[old])
        links[old] = new
        self.counts.append(self.counts[old])
        tokens.append(tokens[old])
        targets.append(targets[old])
        if targets[old] == MANY:
            branches[new] = followers = branches[old].copy()
            self._num_branched += len(followers)
        while state >= 0:
            if targets[state] == MANY:
                followers = branches[state]
                if followers.get(token_id) != old:
                    break
                followers[token_id] = new
            elif targets[state] == old and tokens[state] == token_id:
                targets[state] = new
            else:
                break
            state = links[state]
        return new

    def step(self, state: int, token_id: int) -> int:
        """The state after one more token, or NONE where the texts have no such substring."""
        target = self._targets[state]
        if target == MANY:
            return self._branches[state].get(token_id, NONE)
        return target if target >= 0 and self._tokens[state] == token_id else NONE

    def followers(self, state: int) -> Collection[tuple[int, int]]:
        """(token, state after it) for the tokens that followed a state's substrings.

        At most `MAX_FOLLOWERS`, those seen first: what follows often was mostly seen early, and a
        state with thousands of followers would cost a step more than its guesses are worth.
        """
        target = self._targets[state]
        if target == MANY:
            followers = self._branches[state].items()
            if len(followers) <= MAX_FOLLOWERS:
                return followers
            return tuple(islice(followers, MAX_FOLLOWERS))
        return ((self._tokens[state], target),) if target >= 0 else ()

    def repeated(self) -> SuffixMatch:
        """The longest suffix of the text that occurs in it before."""
        state = max(ROOT, self.links[self.last])
        return SuffixMatch(self, state, self.lengths[state])


class SuffixMatch:
    """The longest suffix of a text that an automaton of other texts knows, token by token.

    `length` tokens match; `state` is theirs. The automaton may grow meanwhile. What it learns then
    lengthens the match only by the tokens that follow.

    Example: against [7, 8, 9], after `extend([5, 7, 8])` the match has length 2.
    """

    __slots__ = ("automaton", "length", "state")

    def __init__(self, automaton: SuffixAutomaton, state: int = ROOT, length: int = 0) -> None:
        self.automaton = automaton
        self.state = state
        self.length = length

    def extend(self, token_ids: Iterable[int]) -> None:
        """Go on with these tokens: amortised constant time for each."""
        automaton = self.automaton
        links, lengths, step = automaton.links, automaton.lengths, automaton.step
        self.settle()
        state, length = self.state, self.length
        for token_id in token_ids:
            after = step(state, token_id)
            while after == NONE and state != ROOT:
                state = links[state]
                length = lengths[state]
                after = step(state, token_id)
            if after == NONE:
                continue
            state = after
            length += 1
        self.state, self.length = state, length

    def settle(self) -> None:
        """Find the state of the match again: one may have been split off for shorter strings."""
        links, lengths = self.automaton.links, self.automaton.lengths
        while self.state != ROOT and lengths[links[self.state]] >= self.length:
            self.state = links[self.state]
