from __future__ import annotations

import logging

from guava_nb.cluster.notices import KEPT, Notices


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
