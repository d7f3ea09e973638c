"""How long seats are kept: a plain loss has the grace, an outage of all has more, and nobody has less."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from guava_nb.link.grace_period import TOGETHER_S, GracePeriod

GRACE_S, OUTAGE_S = 30.0, 300.0


def test_one_that_breaks_alone_has_the_grace() -> None:
    patience = GracePeriod(GRACE_S, OUTAGE_S)
    patience.look(100.0, [100.0, None])
    assert patience.kept_until(100.0) == 130.0
    patience.look(100.0, [100.0])
    assert patience.kept_until(100.0) == 130.0, "a lone worker that died is no outage, while the tunnel stands"


def test_while_the_tunnel_is_down_all_are_kept_and_then_have_the_grace() -> None:
    patience = GracePeriod(GRACE_S, OUTAGE_S)
    patience.look(100.0, [100.0, None])
    patience.went_down(101.0)
    assert patience.kept_until(100.0) == 401.0
    patience.came_up(200.0, moved=False)
    assert patience.kept_until(100.0) == 230.0, "the same address: diallers find it within the grace"
    assert patience.kept_until(201.0) == 231.0, "who breaks afterwards broke alone"


def test_a_new_address_gives_a_person_time_to_hand_it_on() -> None:
    patience = GracePeriod(GRACE_S, OUTAGE_S)
    patience.went_down(100.0)
    patience.came_up(150.0, moved=True)
    assert patience.kept_until(99.0) == patience.kept_until(160.0) == 450.0
    patience.went_down(200.0)
    patience.came_up(210.0, moved=False)
    assert patience.kept_until(99.0) == 450.0, "a second, short outage takes nothing away"
    assert patience.kept_until(451.0) == 481.0


def test_all_together_mean_the_tunnel_even_if_it_says_it_stands() -> None:
    patience = GracePeriod(GRACE_S, OUTAGE_S)
    patience.look(101.0, [100.0, 100.0 + TOGETHER_S])
    assert patience.kept_until(100.0) == 400.0
    patience.look(120.0, [100.0, None])
    assert patience.kept_until(100.0) == 150.0, "one is back: the other one has the grace from then on"
    apart = GracePeriod(GRACE_S, OUTAGE_S)
    apart.look(120.0, [100.0, 101.0 + TOGETHER_S])
    assert apart.kept_until(100.0) == 130.0, "one after the other is no outage"
    bare = GracePeriod(GRACE_S)
    bare.look(101.0, [100.0, 101.0])
    assert bare.kept_until(100.0) == 130.0, "without a tunnel nothing is different"


EVENTS = st.lists(
    st.tuples(
        st.floats(0, 50),
        st.one_of(
            st.just(("down",)),
            st.tuples(st.just("up"), st.booleans()),
            st.tuples(st.just("look"), st.lists(st.one_of(st.none(), st.floats(0, 20)), max_size=4)),
        ),
    ),
    max_size=20,
)


@given(EVENTS, st.floats(0, 60))
def test_nobody_has_less_than_the_grace_nor_more_than_an_outage_after_the_last_event(
    events: list, back_s: float
) -> None:
    patience, now = GracePeriod(GRACE_S, OUTAGE_S), 1000.0
    last_event, under_way = now, False
    for after_s, event in events:
        now += after_s
        if event[0] == "down":
            patience.went_down(now)
            last_event, under_way = now, True
        elif event[0] == "up":
            patience.came_up(now, event[1])
            last_event, under_way = now, False
        else:
            patience.look(now, [None if ago is None else now - ago for ago in event[1]])
            last_event = now
        for lost_at in (now, now - back_s):
            until = patience.kept_until(lost_at)
            assert until >= lost_at + GRACE_S
            assert until <= max(lost_at + GRACE_S, last_event + OUTAGE_S)
        if under_way:
            assert patience.kept_until(now) > now or now - last_event >= OUTAGE_S - GRACE_S
