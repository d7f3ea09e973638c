from __future__ import annotations

import msgspec

from guava_nb.cluster.roster import MOST_GONE, Roster, shortened, version_notes
from guava_nb.protocol.messages import Hello


def hello(name: str = "gpu") -> Hello:
    return Hello(
        name=name,
        program="spawned",
        versions={},
        hostname="host",
        device="cpu",
        device_name="CPU",
        device_uuid="",
    )


def test_names_are_unique_among_the_living() -> None:
    roster = Roster()
    names = [roster.join(hello()).name for _ in range(3)]
    assert names == ["gpu", "gpu-2", "gpu-3"]
    roster.lose(0, "gone")
    assert roster.join(hello()).name == "gpu"


def test_a_seat_survives_suspicion_and_ends_once() -> None:
    roster = Roster()
    rank = roster.join(hello()).rank
    assert roster.suspect(rank, "reset") and not roster.suspect(rank, "again")
    assert roster.ready() == [] and roster.alive() == [rank]
    assert roster.resume(rank) and roster.ready() == [rank]
    assert roster.lose(rank, "killed") and not roster.leave(rank, "late")
    assert roster.alive() == [] and roster.members[rank].detail == "killed"


def test_every_change_is_a_new_generation() -> None:
    roster = Roster()
    seen = [roster.generation]
    rank = roster.join(hello()).rank
    seen.append(roster.generation)
    for change in (lambda: roster.suspect(rank, ""), lambda: roster.resume(rank), lambda: roster.leave(rank, "")):
        change()
        seen.append(roster.generation)
    assert seen == sorted(set(seen))


def test_version_notes_name_both_sides() -> None:
    notes = version_notes({"guava_nb": "1", "python": "3.11", "torch": "2.13.0"}, {"guava_nb": "1", "python": "3.12"})
    assert len(notes) == 2
    assert "python differs: 3.12 on the worker, 3.11 on the orchestrator" in notes


def test_a_worker_is_as_fast_as_its_shards_after_the_first_one() -> None:
    roster = Roster()
    member = roster.join(hello())
    member.note_pace(0, 1.0)
    assert member.sample_s is None and member.shards == 0
    member.note_pace(10, 50.0)  # it compiled
    assert member.sample_s == 5.0
    member.note_pace(10, 1.0)
    assert member.sample_s == 0.1
    member.note_pace(10, 2.0)
    assert 0.1 < member.sample_s < 0.2 and member.shards == 3


def test_what_a_worker_says_of_itself_is_kept_up_to_a_bound() -> None:
    long = "x" * 1_000_000
    told = hello("w" * 5000)
    told = msgspec.structs.replace(
        told, hostname=long, device_name=long, versions={f"{k}{long}": long for k in range(50)}, own=(long,) * 50
    )
    short = shortened(told)
    assert short.name == "w" * 100 and len(msgspec.msgpack.encode(short)) < 20_000
    assert shortened(short) == short


def test_seats_that_are_long_gone_are_forgotten_those_that_worked_last() -> None:
    roster = Roster()
    stays, worked = roster.join(hello()).rank, roster.join(hello()).rank
    roster.members[worked].samples = 8
    roster.lose(worked, "gone")
    for _ in range(MOST_GONE + 5):
        roster.leave(roster.join(hello()).rank, "a visit")
    assert roster.prune() == list(range(2, 8)), "the oldest that did nothing"
    assert roster.prune() == [] and len(roster.members) == MOST_GONE + 1
    assert roster.members[worked].samples == 8 and roster.ready() == [stays]
    assert roster.join(hello()).rank == MOST_GONE + 7, "a rank is given once"


def test_what_comes_late_from_a_forgotten_seat_finds_a_member_that_is_gone() -> None:
    roster = Roster()
    late = roster.members[12]
    assert (late.state, late.alive, late.rank) == ("lost", False, 12)
    assert not roster.lose(12, "again") and list(roster) == []


def test_seats_may_be_taken_and_forgotten_while_others_look() -> None:
    """A job looks at all seats on its own thread, while the dispatcher seats a newcomer."""
    roster = Roster()
    ranks = [roster.join(hello()).rank for _ in range(MOST_GONE + 3)]
    for rank in ranks:
        roster.leave(rank, "")
    looked = 0
    for _ in roster:
        looked += 1
        if looked == 1:
            assert roster.prune()
        roster.join(hello())
    assert looked == len(ranks)
