"""Tokens are told while they are made, and what is given up ends between two of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from guava_nb.protocol.messages import EndRun, Generated, GivenUp, Predict, Tree, Wanted
from guava_nb.replica.model.generate import generate_rows
from guava_nb.worker.token_teller import TELL_S, NobodyWaits, TokenTeller
from tests.unit.replica.model.test_generate import model

BATCH = {"tokens": torch.tensor([[1, 2], [3, 0]]), "length": torch.tensor([2, 1]), "number": torch.tensor([4, 5])}


def question(rows: int = 2, request: int = 7) -> Predict:
    return Predict(run_id="r", request_id=request, rows=rows, batch=Tree(b""), wanted=Wanted(raw=True))


def test_what_is_told_is_a_beginning_of_what_is_answered() -> None:
    sent: list[Any] = []
    times = iter(range(10**6))
    for step_s in (2 * TELL_S, TELL_S / 3, 0.0):  # a message for each token, for some of them, for the first alone
        sent.clear()
        teller = TokenTeller(
            lambda message, buffers: sent.append(message), clock=lambda step_s=step_s: next(times) * step_s
        )
        with teller.during(question()):
            rows = generate_rows(model(), BATCH, sampling={"new": 9})
        told: dict[int, list[int]] = {4: [], 5: []}
        for message in sent:
            assert isinstance(message, Generated) and message.begin == len(told[message.number])
            told[message.number] += message.tokens
        assert all(told[4 + row] == rows[row, : len(told[4 + row])].tolist() for row in (0, 1))
        assert len(told[5]) == 9 if step_s > TELL_S else 0 < len(told[4]) < 9
    sent.clear()
    with teller.during(question(rows=0)):
        generate_rows(model(), BATCH, sampling={"new": 9})
    assert not sent, "a stand-in is no one's prompt"


def test_a_prompt_ends_when_no_one_waits_for_it() -> None:
    net, seen = model(), []
    leaves: list[bool] = []
    teller = TokenTeller(lambda message, buffers: None, lambda: bool(leaves))
    net.register_forward_pre_hook(lambda module, args: seen.append(len(seen)))
    net.register_forward_pre_hook(
        lambda module, args: None if len(seen) < 3 or not teller.post(GivenUp("r", 7)) else None
    )
    with pytest.raises(NobodyWaits), teller.during(question()):
        generate_rows(net, BATCH, sampling={"new": 100})
    assert len(seen) == 3
    with pytest.raises(NobodyWaits), teller.during(question()):
        raise AssertionError("what is given up before it begins does not begin")
    with teller.during(question(request=8)):
        generate_rows(net, BATCH, sampling={"new": 2})
    leaves.append(True)
    with pytest.raises(NobodyWaits), teller.during(question(request=9)):
        pass
    assert not teller.post(EndRun("r"))
