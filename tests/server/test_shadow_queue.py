"""ShadowQueue: never more than its bounds, the oldest out first; and what is run again."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.params import SamplingParams
from specdec.server.shadow_queue import Answered, ShadowQueue


def answered(name: str = "a", num_prompt: int = 1, num_output: int = 1, **params: Any) -> Answered:
    return Answered(
        name,
        (1,) * num_prompt,
        SamplingParams(**{"seed": 5, **params}),
        "salt",
        (2,) * num_output,
        "stop",
    )


@given(
    bounds=st.tuples(st.integers(1, 3), st.integers(1, 12)),
    acts=st.lists(st.none() | st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=40),
)
def test_it_holds_the_newest_that_fit(
    bounds: tuple[int, int], acts: list[tuple[int, int] | None]
) -> None:
    queue, model = ShadowQueue(*bounds), deque[Answered]()
    for number, act in enumerate(acts):
        if act is None:
            if model:
                assert queue.take() is model.popleft()
        else:
            item = answered(str(number), *act)
            before = len(model)
            if sum(act) <= bounds[1]:
                model.append(item)
                while len(model) > bounds[0] or sum(i.num_tokens for i in model) > bounds[1]:
                    model.popleft()
            assert queue.add(item) == before + 1 - len(model)
        assert len(queue) == len(model)
        assert queue.num_tokens == sum(item.num_tokens for item in model) <= bounds[1]
    assert [queue.take() for _ in range(len(queue))] == list(model)


def test_dropping_all_leaves_room() -> None:
    queue = ShadowQueue(2, 10)
    assert queue.add(answered()) + queue.add(answered()) == 0
    assert queue.clear() == 2
    assert (len(queue), queue.num_tokens) == (0, 0)
    with pytest.raises(IndexError):
        queue.take()


def test_parameters_that_hold_many_ids_count() -> None:
    item = answered(
        num_prompt=3,
        num_output=4,
        logit_bias={1: 1.0, 2: 1.0},
        allowed_token_ids=frozenset({1, 2, 3}),
        bad_words=((1, 2), (3,)),
    )
    assert item.num_tokens == 3 + 4 + 2 + 3 + 3


@pytest.mark.parametrize(
    ("params", "logprobs"),
    [
        ({"stop": ("x",), "stop_token_ids": frozenset({3}), "logprobs": 5, "top_p": 0.5}, 2),
        ({"temperature": 0.7}, None),
        ({"temperature": 0.7, "logprobs": 5}, None),
        ({"presence_penalty": 0.1}, None),
        ({"frequency_penalty": 0.1}, None),
        ({"repetition_penalty": 1.1}, None),
        ({"logit_bias": {1: 1.0}}, None),
        ({"bad_words": ((1,),)}, None),
        ({"allowed_token_ids": frozenset({1})}, None),
        ({"min_tokens": 1}, None),
    ],
)
def test_it_is_asked_again_alike_but_for_logprobs(
    params: dict[str, Any], logprobs: int | None
) -> None:
    """The two likeliest tell a near tie only where the likeliest is what is chosen."""
    item = answered(**params)
    again = item.again("shadow-1")
    assert again.is_shadow
    assert (again.request_id, again.prompt_ids, again.cache_salt) == ("shadow-1", (1,), "salt")
    assert again.params == SamplingParams(**{"seed": 5, **params, "logprobs": logprobs})
