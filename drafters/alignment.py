"""Alignment: where in a predicted text an answer stands that follows the text and edits it.

A small filter over places of the text. Each guess says which of its tokens comes next; while the
answer follows, one guess has all the weight. Where the answer departs, the weight goes to "lost",
and from there to the places at which it may rejoin the text: the place itself (something was
inserted), as many tokens further as the answer has written since (replaced), or wherever in the
neighbourhood the answer's last token stands (deleted). A rare token that stands near is strong
evidence, a comma is little; the guesses that survive the next tokens take over.

What was replaced by what is remembered: a name that was changed once is likely to be changed again
where it stands next. The constants were chosen on simulated edits of code and prose; halving or
doubling one changes tokens per step by less than 1 %.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import pow
from typing import NamedTuple

MAX_GUESSES = 8  # kept from token to token
MIN_WEIGHT = 1e-4  # of the heaviest; a lighter guess is dropped, to be found again if it is right
ANCHORED = 4  # tokens followed in a row after which a guess is sure of its place
FOLLOW = (1.0, 0.75, 0.88, 0.94)  # P(followed further) after 0 to 3 tokens; 0: a jump implies one
BEHIND, AHEAD = 16, 512  # neighbourhood of a departure in tokens
MAX_NEAR = 8  # places of one token that are looked at there
GRAM_LEN = 3  # tokens that give a far place away, as when blocks are reordered
MAX_FAR = 3
FAR_SHARE = 0.6  # of the lost weight, for far places
MAX_EDIT_LEN = 12  # tokens on either side of a remembered edit
MAX_EDITS = 64
FIRST_RATE, MAX_RATE = 0.35, 0.95  # P(a remembered edit is done again): at first, and at most


class PredictedText:
    """The tokens of a predicted text and where each stands; built once per request.

    Example: `PredictedText([5, 6, 5]).near(5, 0)` is `[0, 2]`.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)
        self._places: dict[int, list[int]] = {}
        self._grams: dict[tuple[int, ...], list[int]] = {}
        for place, token_id in enumerate(self.token_ids):
            self._places.setdefault(token_id, []).append(place)
            if place >= GRAM_LEN - 1:
                gram = self.token_ids[place - GRAM_LEN + 1 : place + 1]
                self._grams.setdefault(gram, []).append(place)

    def __len__(self) -> int:
        return len(self.token_ids)

    def near(self, token_id: int, centre: int) -> list[int]:
        """Places of a token in the neighbourhood of `centre`, at most MAX_NEAR, ascending."""
        places = self._places.get(token_id, [])
        first = bisect_left(places, centre - BEHIND)
        return [place for place in places[first : first + MAX_NEAR] if place < centre + AHEAD]

    def far(self, gram: Sequence[int], centre: int) -> list[int]:
        """Places of the last token of an n-gram, at most MAX_FAR on either side of `centre`."""
        places = self._grams.get(tuple(gram), [])
        first = bisect_left(places, centre)
        return [*places[first : first + MAX_FAR], *places[max(0, first - MAX_FAR) : first][::-1]]

    def share(self, token_id: int) -> float:
        """How much of the text is this token, or nearly nothing: what a chance match is worth."""
        return (len(self._places.get(token_id, ())) + 0.5) / (len(self.token_ids) + 50)


class Departure(NamedTuple):
    """Where the answer left the text: the token that did not come, and the output's length then."""

    place: int
    num_output: int


@dataclass(eq=False)
class Edit:
    """Tokens of the text, what the answer wrote instead, and P(it does so where they stand next).

    The rate goes half of the way to its most or its least each time.
    """

    old: tuple[int, ...]
    new: tuple[int, ...]
    rate: float = FIRST_RATE

    def note(self, *, is_done: bool) -> None:
        """Learn from a place where the edit could be done again."""
        self.rate = (self.rate + (MAX_RATE if is_done else 0.0)) / 2


class Guess(NamedTuple):
    """A place of the text that comes next, after what a remembered edit writes before it."""

    place: int
    weight: float  # P(right); those of all guesses and of "lost" add up to 1
    run: int  # tokens followed in a row
    origin: Departure | None = None  # where the answer was lost before this run
    edit: Edit | None = None
    pending: tuple[int, ...] = ()  # what is still to come of the edit

    def after(self, weight: float) -> Guess:
        """This guess once its next token has come."""
        run = self.run + 1
        if len(self.pending) > 1:
            return Guess(self.place, weight, run, self.origin, self.edit, self.pending[1:])
        return Guess(self.place + (not self.pending), weight, run, self.origin)


Moved = dict[tuple[int, tuple[int, ...]], Guess]  # by place and pending tokens


class Alignment:
    """Follows one answer through its predicted text, a token at a time.

    The cost of a token is bounded, whatever the lengths of text and answer.

    Example:
        alignment = Alignment(PredictedText([1, 2, 3, 4, 5, 6]))
        for token_id in (1, 2, 9, 4, 5):  # 3 was replaced
            alignment.advance(token_id)
        alignment.place  # 5, where the 6 stands
    """

    def __init__(self, text: PredictedText) -> None:
        self.text = text
        self.output: list[int] = []
        self._guesses = [Guess(0, 0.6, 0)]
        self._lost = 0.4  # an answer may begin with words of its own
        self._origin = Departure(0, 0)  # of the lost weight
        self._edits: dict[int, list[Edit]] = {}  # by the first old token
        self._num_edits = 0
        self._num_followed, self._num_left = 30, 1  # by sure guesses, as if these had been seen

    @property
    def place(self) -> int | None:
        """The likeliest place of the next token, None where "lost" is likelier."""
        top = max(self._guesses, key=_weight, default=None)
        return None if top is None or top.weight < self._lost else top.place

    def advance(self, token_id: int) -> None:
        """Take one more token of the answer."""
        moved: Moved = {}
        done: dict[tuple[int, tuple[int, ...]], Edit] = {}
        lost = heaviest = self._lost
        for guess in self._guesses:
            follow = self._follow(guess.run)
            is_followed = self._next(guess) == token_id
            if guess.run >= ANCHORED and guess.weight > 0.5:
                self._num_followed += is_followed
                self._num_left += not is_followed
            if is_followed:
                after = guess.after(guess.weight * follow)
                _put(moved, after)
                if guess.edit is not None and after.edit is None:
                    done[after.place, ()] = guess.edit
                continue
            if guess.edit is not None and guess.pending == guess.edit.new:
                guess.edit.note(is_done=False)
            leak = guess.weight * (1.0 - follow)
            lost += leak
            if leak > heaviest:
                heaviest = leak
                self._origin = self._departure(guess)
        lost = self._rejoin(token_id, lost, moved)
        self.output.append(token_id)
        self._settle(moved, lost)
        self._look_far()
        self._learn(done)
        self._guesses = self._arrive(self._guesses)

    def guesses(self) -> list[Guess]:
        """What may come next: the guesses, and where a lost answer may rejoin the text."""
        if self._lost < 0.01:
            return self._guesses
        num_new = len(self.output) - self._origin.num_output
        weight = self._lost * _rejoin_rate(num_new)
        shifts = {*range(8), *range(max(8, num_new - 2), num_new + 3)}
        rejoins = [
            Guess(place, weight * _nearness(shift, num_new), 0, self._origin)
            for shift in sorted(shifts)
            if (place := self._origin.place + shift) < len(self.text)
        ]
        return [*self._guesses, *rejoins]

    def branches(self, guesses: Sequence[Guess]) -> dict[int, list[Guess]]:
        """Guesses by the token that comes next, each as it stands after that token.

        What is missing of their weights is the chance that the text is left here.
        """
        found: dict[int, list[Guess]] = {}
        for guess in guesses:
            token_id = self._next(guess)
            if token_id is not None:
                after = guess.after(guess.weight * self._follow(guess.run))
                found.setdefault(token_id, []).append(after)
        return {token_id: self._arrive(after) for token_id, after in found.items()}

    def _next(self, guess: Guess) -> int | None:
        if guess.pending:
            return guess.pending[0]
        return self.text.token_ids[guess.place] if guess.place < len(self.text) else None

    def _follow(self, run: int) -> float:
        if run < ANCHORED:
            return FOLLOW[run]
        return self._num_followed / (self._num_followed + self._num_left)

    def _departure(self, guess: Guess) -> Departure:
        if guess.run < ANCHORED and guess.origin is not None:
            return guess.origin  # it never rejoined the text, as it seems now
        return Departure(guess.place, len(self.output))

    def _rejoin(self, token_id: int, lost: float, moved: Moved) -> float:
        """Move weight from "lost" to the near places of this token; returns what stays lost."""
        num_new = len(self.output) - self._origin.num_output
        rate = _rejoin_rate(num_new)
        for place in self.text.near(token_id, self._origin.place):
            weight = lost * rate * _nearness(place - self._origin.place, num_new)
            _put(moved, Guess(place + 1, weight, 1, self._origin))
        return lost * (1.0 - rate) * self.text.share(token_id)

    def _settle(self, moved: Moved, lost: float) -> None:
        """Keep the heaviest guesses, and make all weights add up to 1."""
        kept = sorted(moved.values(), key=_weight, reverse=True)[:MAX_GUESSES]
        least = MIN_WEIGHT * max(lost, kept[0].weight if kept else 0.0)
        kept = [guess for guess in kept if guess.weight > least]
        total = lost + sum(map(_weight, kept))
        self._guesses = [guess._replace(weight=guess.weight / total) for guess in kept]
        self._lost = lost / total

    def _look_far(self) -> None:
        """Nothing near fits: perhaps the last tokens stand somewhere else in the text."""
        if self._lost < 0.2:
            return
        known = {guess.place for guess in self._guesses}
        ends = self.text.far(self.output[-GRAM_LEN:], self._origin.place)
        places = [end + 1 for end in ends if end + 1 not in known][:MAX_FAR]
        for place in places:
            weight = self._lost * FAR_SHARE / len(places)
            self._guesses.append(Guess(place, weight, GRAM_LEN, self._origin))
        if places:
            self._lost *= 1.0 - FAR_SHARE

    def _learn(self, done: dict[tuple[int, tuple[int, ...]], Edit]) -> None:
        """Remember what the likeliest guess shows: a new edit, or that a known one was redone."""
        top = max(self._guesses, key=_weight, default=None)
        if top is None:
            return
        redone = done.get((top.place, top.pending))
        if redone is not None:
            redone.note(is_done=True)
        elif top.run == ANCHORED and top.origin is not None and not top.pending:
            old = self.text.token_ids[top.origin.place : top.place - top.run]
            new = self.output[top.origin.num_output : len(self.output) - top.run]
            if 0 < len(old) <= MAX_EDIT_LEN and 0 < len(new) <= MAX_EDIT_LEN:
                self._remember(old, tuple(new))

    def _remember(self, old: tuple[int, ...], new: tuple[int, ...]) -> None:
        edits = self._edits.setdefault(old[0], [])
        for edit in edits:
            if (edit.old, edit.new) == (old, new):
                edit.note(is_done=True)
                return
        if self._num_edits < MAX_EDITS:
            self._num_edits += 1
            edits.insert(0, Edit(old, new))

    def _arrive(self, guesses: list[Guess]) -> list[Guess]:
        """Split guesses that stand before a remembered edit: it is done again, or it is not."""
        if not self._edits:
            return guesses
        found: list[Guess] = []
        for guess in guesses:
            plain = guess
            for edit in self._edits_at(guess):
                weight = plain.weight * edit.rate
                place = guess.place + len(edit.old)
                found.append(Guess(place, weight, guess.run, guess.origin, edit, edit.new))
                plain = plain._replace(weight=plain.weight - weight)
            found.append(plain)
        return found

    def _edits_at(self, guess: Guess) -> list[Edit]:
        tokens, place = self.text.token_ids, guess.place
        if guess.edit is not None or place >= len(tokens):
            return []
        edits = self._edits.get(tokens[place], ())
        return [edit for edit in edits if tokens[place : place + len(edit.old)] == edit.old]


def _weight(guess: Guess) -> float:
    return guess.weight


def _put(moved: Moved, guess: Guess) -> None:
    """Add a guess; two at the same place become one."""
    key = guess.place, guess.pending
    known = moved.get(key)
    if known is not None:
        longer = known if known.run >= guess.run else guess
        guess = longer._replace(weight=known.weight + guess.weight)
    moved[key] = guess


def _rejoin_rate(num_new: int) -> float:
    """P(a lost answer rejoins the text with its next token) after so many tokens of its own."""
    return max(0.01, 0.4 / (1 + num_new / 6))


def _nearness(shift: int, num_new: int) -> float:
    """P(it rejoins so far after its departure), given that it rejoins after `num_new` tokens."""
    if shift < 0:
        return 0.02 * pow(1 - shift, -1.5)
    return 0.25 * (shift == 0) + 0.25 * (shift == num_new) + 0.12 * pow(shift + 1, -1.2)
