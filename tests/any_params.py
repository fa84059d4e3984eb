"""Any sampling parameters, as a hypothesis strategy over the toy model's tokens."""

from __future__ import annotations

from hypothesis import strategies as st

from specdec.params import SamplingParams
from tests.toy import ALPHABET

VOCAB = len(ALPHABET)
tokens = st.integers(0, VOCAB - 1)

params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.integers(3, 40),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 0, 3, VOCAB + 5]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 0.6]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=st.dictionaries(tokens, st.floats(-5, 5), max_size=2),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=2).map(tuple), max_size=1).map(tuple),
    allowed_token_ids=st.none() | st.just(frozenset(range(0, VOCAB, 2))),
    min_tokens=st.integers(0, 3),
    stop=st.sampled_from([(), (), ("ab",), ("b", "ca")]),
    stop_token_ids=st.sampled_from([frozenset(), frozenset({4})]),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, None, 2]),
)
