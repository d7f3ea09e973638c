from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from guava_nb.errors import LocalProtocolError
from guava_nb.wire_formats.error_feedback import ErrorFeedback
from guava_nb.wire_formats.registry import WIRE_FORMATS
from guava_nb.wire_formats.top_k import TopK
from guava_nb.wire_formats.wire_format import WireFormat

LOSSY = [WIRE_FORMATS["bf16"], WIRE_FORMATS["fp16"], WIRE_FORMATS["int8"], WIRE_FORMATS["int4"], TopK(3, 20, 2)]
EVERY = pytest.mark.parametrize("wire", LOSSY, ids=lambda wire: wire.name)


def inputs(seed: int, count: int, numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, dtype=torch.float64, generator=generator) for _ in range(count)]


def read(feedback: ErrorFeedback, key: object, flat: torch.Tensor) -> torch.Tensor:
    """What every receiver reads in the message of a tensor."""
    return feedback.wire_format.decode(feedback.encode(key, flat), flat.numel(), flat.dtype)


@EVERY
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), numel=st.integers(1, 90), count=st.integers(1, 12))
def test_what_was_sent_and_the_residual_are_what_was_given(wire: WireFormat, seed: int, numel: int, count: int) -> None:
    feedback, given_ = ErrorFeedback(wire), inputs(seed, count, numel)
    sent = torch.zeros(numel, dtype=torch.float64)
    for flat in given_:
        sent += read(feedback, 0, flat)
        feedback.commit()
    rest = feedback.rest(0)
    assert rest is not None and torch.allclose(sent + rest, sum(given_, torch.zeros(numel)), rtol=0, atol=1e-12)


@EVERY
def test_a_step_that_does_not_count_leaves_no_trace(wire: WireFormat) -> None:
    disturbed, plain = ErrorFeedback(wire), ErrorFeedback(wire)
    for number, flat in enumerate(inputs(3, 5, 50)):
        if number % 2:
            disturbed.encode(0, flat * 3)
            disturbed.encode(0, torch.full_like(flat, torch.nan))
            disturbed.discard()
        assert disturbed.encode(0, flat) == plain.encode(0, flat)
        disturbed.commit()
        plain.commit()


@EVERY
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), steps=st.lists(st.lists(st.booleans(), max_size=3), min_size=1, max_size=6))
def test_a_message_that_does_not_count_though_its_step_does_is_not_owed(
    wire: WireFormat, seed: int, steps: list[list[bool]]
) -> None:
    """A shard that another worker did, too: its samples are in that one's message and residual."""
    feedback, inputs_ = ErrorFeedback(wire), iter(inputs(seed, sum(map(len, steps)), 40))
    given_ = sent = torch.zeros(40, dtype=torch.float64)
    for counts in steps:
        for number, does_count in enumerate(counts):
            flat = next(inputs_)
            came = wire.decode(feedback.encode(0, flat, number), 40, flat.dtype)
            given_, sent = (given_ + flat, sent + came) if does_count else (given_, sent)
        feedback.commit({number for number, does_count in enumerate(counts) if not does_count})
    rest = feedback.rest(0)
    assert torch.allclose(sent + (0 if rest is None else rest), given_, rtol=0, atol=1e-12)


def test_two_messages_of_one_step_follow_on() -> None:
    """A worker that takes over a shard sends one bucket twice."""
    first, second = inputs(1, 2, 60)
    feedback = ErrorFeedback(LOSSY[3])
    sent = read(feedback, "a", first) + read(feedback, "a", second)
    feedback.commit()
    rest = feedback.rest("a")
    assert rest is not None and torch.allclose(sent + rest, first + second, rtol=0, atol=1e-12)
    assert feedback.norm() == pytest.approx(rest.norm().item())


def test_what_is_not_finite_does_not_stay_even_where_its_step_counts() -> None:
    feedback = ErrorFeedback(LOSSY[2])
    assert read(feedback, 0, torch.full((9,), torch.inf)).isnan().all()
    feedback.commit()
    assert torch.allclose(read(feedback, 0, torch.ones(9)), torch.ones(9), rtol=0.01)


def test_an_exact_format_has_no_residual() -> None:
    feedback = ErrorFeedback(WIRE_FORMATS["fp32"])
    feedback.encode(0, torch.randn(5))
    feedback.commit()
    assert feedback.rest(0) is None and feedback.norm() == 0


def test_decay_forgets() -> None:
    feedback = ErrorFeedback(TopK(1, 4, 32), decay=0.5)
    feedback.encode(0, torch.tensor([4.0, 1.0, 0.0, 0.0]))
    feedback.commit()
    assert read(feedback, 0, torch.zeros(4)).tolist() == [0.0, 0.5, 0.0, 0.0]


def test_another_size_is_refused() -> None:
    feedback = ErrorFeedback(LOSSY[0])
    feedback.encode(0, torch.zeros(3))
    with pytest.raises(LocalProtocolError, match="4 elements for the residual of 3"):
        feedback.encode(0, torch.zeros(4))
