"""Workers that a session starts elsewhere, with a launcher that starts nothing: first ones, goings-on, ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from guava_nb.cluster.elsewhere import launched_workers
from guava_nb.cluster.host import SessionHost
from guava_nb.errors import ClusterError, ConfigError
from guava_nb.launchers import launches
from tests.unit.launchers.test_launches import Fake


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(text: str) -> Fake:
        made = Fake(text.partition(":")[2])
        made.count = 3
        monkeypatch.setattr(Fake, "needs_address", False)
        return made

    for module in (launched_workers, launches):
        monkeypatch.setattr(module, "make_launcher", make)
    monkeypatch.setattr(Fake, "ended", [])


def test_a_session_begins_with_its_workers_and_ends_them() -> None:
    with SessionHost(workers_on="fake:3") as session:
        one = session.launched("fake:3")
        assert one is not None and session.expected_workers == 3 and session.launched("fake:4") is None
        two = session.launch_on("fake:4")
        assert not Fake.ended
    assert Fake.ended == [one.mark, two.mark]


def test_a_number_of_workers_that_was_given_stands() -> None:
    with SessionHost(workers_on="fake:3", num_workers=5) as session:
        assert session.expected_workers == 5


def test_a_first_start_that_fails_leaves_nothing_open() -> None:
    session = SessionHost(workers_on="fake:breaks")
    with pytest.raises(ConfigError, match="in the middle"):
        session.open()
    with pytest.raises(ClusterError, match="not open"):
        session.launch_on("fake:3")
    assert len(Fake.ended) == 1


def test_a_later_start_that_fails_leaves_the_session_open() -> None:
    with SessionHost() as session:
        code = session.join_code
        with pytest.raises(ConfigError, match="in the middle"):
            session.launch_on("fake:breaks")
        assert session.join_code == code and len(Fake.ended) == 1


def test_a_session_that_only_dials_starts_nothing() -> None:
    with pytest.raises(ClusterError, match="not open"):
        SessionHost().launch_on("fake:3")


def test_what_a_killed_process_started_goes_on_and_ends_with_the_session(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    killed = SessionHost(workers_on="fake:3", session_file=str(path))
    killed.open()
    one = killed.launched("fake:3")
    assert one is not None
    killed._launches = None  # it ends without a word: nothing is closed
    killed._let_file_go(forget=False)
    killed._listener.close("killed")  # type: ignore[union-attr]
    with SessionHost(workers_on="fake:3", session_file=str(path)) as session:
        again = session.launched("fake:3")
        assert session.goes_on and again is not None and again.mark == one.mark, "not a second time"
    assert Fake.ended == [one.mark] and not path.with_suffix(".launched").exists()
    killed.close()


def test_workers_that_have_all_ended_are_not_waited_for() -> None:
    with SessionHost() as session:
        one = session.launch_on("fake:3")
        assert isinstance(one, Fake)
        one.why = "the job is over"
        with pytest.raises(ConfigError, match="ended before they joined: the job is over"):
            session.wait_for_launched(3, 60)
