"""A copy that two sides keep alike by short messages: the same bits on both, nearer with each, whatever is lost on the way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.errors import RemoteProtocolError
from guava_nb.wire_formats import held_tensors
from guava_nb.wire_formats.held_tensors import CHUNK, HeldTensors, largest_count
from guava_nb.wire_formats.top_k import TopK

MOVING = ("weight", "half", "double", "tied")


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(90, 100, generator=generator)
    return {
        "weight": weight,
        "half": torch.randn(7, generator=generator).bfloat16(),
        "frozen": torch.randn(5, generator=generator),
        "double": torch.randn(3, 4, generator=generator, dtype=torch.float64),
        "count": torch.tensor(seed),
        "tied": weight,
    }


def same(one: HeldTensors, other: HeldTensors) -> bool:
    here, there = one.tensors(), other.tensors()
    return here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)


def distance(held: HeldTensors, now: dict[str, torch.Tensor]) -> float:
    return sum(float((held.tensors()[name].double() - now[name].double()).square().sum()) for name in MOVING) ** 0.5


@given(st.lists(st.sampled_from(["arrives", "is lost", "sender starts anew"]), max_size=8), st.integers(1, 4096))
def test_both_sides_hold_the_same_bits_whatever_is_lost(events: list[str], count: int) -> None:
    sender, other = HeldTensors(tensors(0), MOVING), HeldTensors(tensors(0), MOVING)
    for number, event in enumerate(events):
        assert sender.settle(other.count)
        messages, exact, left_out = sender.propose(tensors(number + 1), count)
        assert 0 <= left_out <= 1
        if event == "sender starts anew":  # from its file, not knowing whether the message arrived
            sender = HeldTensors.from_content(sender.content())
        if event != "is lost":
            other.take(count, messages, exact)
    assert sender.settle(other.count) and same(sender, other)


def test_each_message_brings_it_nearer_and_what_was_left_out_comes_later() -> None:
    now, held = tensors(1), HeldTensors(tensors(0), MOVING)
    before = distance(held, now)
    for _ in range(6):
        *_, left_out = held.propose(now, 1024)
        assert held.settle(held.count + 1)
        assert distance(held, now) == pytest.approx(left_out * before, rel=1e-2)
        before = distance(held, now)
    assert torch.equal(held.tensors()["count"], now["count"]) and torch.equal(held.tensors()["frozen"], now["frozen"])


def test_a_tensor_of_two_names_travels_once_and_types_stay() -> None:
    held = HeldTensors(tensors(0), MOVING)
    assert held.moving_elements == 90 * 100 + 7 + 12
    made = held.tensors()
    assert made["tied"] is made["weight"]
    assert [made[name].dtype for name in made] == [one.dtype for one in tensors(0).values()]


def test_what_did_not_change_is_not_sent() -> None:
    held = HeldTensors(tensors(0), MOVING)
    messages, exact, left_out = held.propose(tensors(0), 64)
    assert exact == {} and left_out == 0.0
    assert sum(one.numel() for one in messages) == TopK(64, CHUNK).encoded_bytes(9007) + TopK(64, CHUNK).encoded_bytes(
        12, torch.float64
    )


def test_pieces_are_those_of_one_flat_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_tensors, "_SLICE", CHUNK)
    sender, other = HeldTensors(tensors(0), MOVING), HeldTensors(tensors(0), MOVING)
    messages, exact, _ = sender.propose(tensors(1), 512)
    assert len(messages) == 3 + 1
    other.take(512, messages, exact)
    assert sender.settle(1) and same(sender, other)


def test_another_number_of_messages_cannot_be_settled() -> None:
    held = HeldTensors(tensors(0), MOVING)
    held.propose(tensors(1), 64)
    assert not held.settle(2) and not held.settle(1) and held.settle(0)


def test_a_message_that_does_not_fit_changes_nothing() -> None:
    held = HeldTensors(tensors(0), MOVING)
    messages, exact, _ = HeldTensors(tensors(0), MOVING).propose(tensors(1), 64)
    for wrong, others in (
        (messages[:1], exact),
        ([messages[0][:-1], messages[1]], exact),
        (messages, {"weight": torch.zeros(90, 100)}),
        (messages, {"unknown": torch.zeros(1)}),
        (messages, {"frozen": torch.zeros(6)}),
        (messages, {"frozen": torch.zeros(5, dtype=torch.float64)}),
    ):
        with pytest.raises(RemoteProtocolError):
            held.take(64, wrong, others)
        assert held.count == 0 and same(held, HeldTensors(tensors(0), MOVING))
    nan = {name: one * float("nan") if one.is_floating_point() else one for name, one in tensors(1).items()}
    messages, exact, _ = HeldTensors(tensors(0), MOVING).propose(nan, 64)
    with pytest.raises(RemoteProtocolError, match="not finite"):
        held.take(64, messages, {})


@given(st.integers(0, 200_000), st.integers(0, 60_000))
def test_the_largest_count_is_the_last_that_fits(numel: int, nbytes: int) -> None:
    count = largest_count(numel, nbytes, 1024)
    assert 0 <= count <= 1024
    assert count == 0 or TopK(count, CHUNK).encoded_bytes(numel) <= nbytes
    assert count == 1024 or TopK(count + 1, CHUNK).encoded_bytes(numel) > nbytes
