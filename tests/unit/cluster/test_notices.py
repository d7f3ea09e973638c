from __future__ import annotations

import logging

from guava_nb.cluster.notices import KEPT, OFTEN, OFTEN_S, STOOD_S, LineBreaks, Notices, Standstill

ALONE = "phone: connection broke (it ended); no other worker is here: its work waits"


def last(notices: Notices, count: int) -> tuple[str, ...]:
    return tuple(sentence for _, sentence in notices.numbered(count))


def test_sentences_and_the_package_s_warnings_in_order() -> None:
    notices = Notices()
    notices.listen()
    try:
        notices.add("one joined")
        logging.getLogger("guava_nb.link.listener").warning("refused a connection from %s", "a stranger")
        logging.getLogger("guava_nb").info("not worth a notice")
        logging.getLogger("someone.else").warning("not ours")
    finally:
        notices.stop()
    logging.getLogger("guava_nb.link").warning("after stop")
    assert last(notices, 10) == ("one joined", "refused a connection from a stranger")
    assert last(notices, 1) == ("refused a connection from a stranger",)


def test_what_is_over_is_forgotten_and_numbers_tell_what_is_new() -> None:
    notices = Notices()
    notices.replace("the tunnel broke", "tunnel")
    notices.add("one joined")
    notices.add("goes on from the weights of the last run", "start")
    assert last(notices, 2) == ("one joined", "goes on from the weights of the last run")
    notices.replace("it has a new address", "tunnel")
    notices.forget("start")
    assert notices.numbered(10) == ((2, "one joined"), (4, "it has a new address"))


def test_only_the_newest_are_kept() -> None:
    notices = Notices()
    for k in range(3 * KEPT):
        notices.add(str(k))
    assert len(last(notices, 10 * KEPT)) == KEPT and last(notices, 1) == (str(3 * KEPT - 1),)


def test_a_line_that_breaks_often_is_told_as_one_and_another_line_as_before() -> None:
    breaks, told = LineBreaks(), []
    for k in range(60):
        told += [breaks.broke(0, "phone", "it ended", False, 2.0 * k), breaks.back(0, "phone", 2.0 * k + 1)]
    said = [sentence for sentence in told if sentence]
    assert said[: 2 * (OFTEN - 1)] == [ALONE, "phone: connection is back"] * 3
    (often,) = said[2 * (OFTEN - 1) :]
    assert f"phone: its connection broke {OFTEN} times in 6 s" in often
    assert (
        breaks.broke(1, "lab", "it ended", True, 119.0) == "lab: connection broke (it ended); its work goes to others"
    )
    assert "broke 58 times in 120 s" in breaks.broke(0, "phone", "it ended", False, OFTEN_S + 6)


def test_a_line_that_holds_again_is_told_as_any_other() -> None:
    breaks = LineBreaks()
    for k in range(10):
        breaks.broke(0, "phone", "it ended", False, float(k))
    later = 10 * OFTEN_S
    assert breaks.broke(0, "phone", "it ended", False, later) == ALONE
    assert breaks.back(0, "phone", later + 1) == "phone: connection is back"


def test_a_process_that_slept_is_told_and_one_that_computed_is_not() -> None:
    process = Standstill()
    process.wait(now=1000.0, cpu_s=7.0)
    assert process.look(5.0, now=1005.0 + STOOD_S - 1, cpu_s=7.0) == ""  # a machine with much to do
    assert process.look(5.0, now=1100.0, cpu_s=60.0) == ""  # one long call that held Python's lock
    told = process.look(5.0, now=1300.0, cpu_s=7.1, wall=1_000_000_300.0)
    assert told.startswith("the orchestrator's process stood still for 5 min (from ")
    assert "work goes on where it stood" in told
    process.wait(now=1300.0, cpu_s=7.1)
    assert process.look(5.0, now=1305.0, cpu_s=7.1) == ""  # once
