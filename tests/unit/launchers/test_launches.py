"""What a session has started: begun, watched, ended with it; noted on disk for the kernel after this one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from guava_nb.errors import ConfigError
from guava_nb.launchers import launches, registry
from guava_nb.launchers.launcher import Launcher, Order
from guava_nb.launchers.launches import Launches
from guava_nb.protocol.joincode import JoinCode
from tests.support.processes import eventually


class Fake(Launcher):
    """Starts nothing, and remembers."""

    name = "fake"
    ended: list[str] = []

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.codes: list[JoinCode] = []
        self.why = ""

    def check(self) -> None:
        if self.what == "missing":
            raise ConfigError("fake is not here")

    def start(self, order: Order) -> str:
        if self.what == "breaks":
            raise ConfigError("it broke in the middle")
        return "two are started"

    def follow(self, code: JoinCode) -> None:
        self.codes.append(code)
        if self.what == "deaf":
            raise ConfigError("deaf")

    def look(self) -> str:
        return "one has ended"

    def failure(self) -> str:
        return self.why

    def end(self) -> str:
        self.ended.append(self.mark)
        return "one is still there" if self.what == "stays" else ""


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._OURS, "fake", ("unused", "unused"))
    monkeypatch.setattr(launches, "make_launcher", lambda text: Fake(text.partition(":")[2]))
    monkeypatch.setattr(Fake, "ended", [])
    monkeypatch.setattr(launches, "LOOK_S", 0.05)


def test_news_are_told_until_the_end(tmp_path: Path, order: Order) -> None:
    told: list[str] = []
    all_ = Launches(told.append, tmp_path / "s.launched")
    one = Fake("2")
    all_.start(one, "fake:2", order)
    eventually(lambda: "one has ended" in told, 20, "the watcher looks")
    assert told[0] == "two are started" and all_.find("fake:2") is one and all_.find("fake:3") is None
    all_.follow(order.code)
    assert one.codes == [order.code]
    one.why = "both have ended"
    assert all_.failure() == "both have ended" and all_.find("fake:2") is None
    all_.end()
    all_.end()
    assert Fake.ended == [one.mark] and not (tmp_path / "s.launched").exists()


def test_one_that_may_still_come_is_no_failure(order: Order) -> None:
    all_ = Launches(lambda sentence: None, None)
    first, second = Fake("1"), Fake("2")
    for one in (first, second):
        all_.start(one, f"fake:{one.what}", order)
    first.why = "ended"
    assert all_.failure() == ""
    all_.end()


def test_a_start_that_breaks_is_ended_and_one_whose_need_is_missing_never_began(tmp_path: Path, order: Order) -> None:
    path = tmp_path / "s.launched"
    all_ = Launches(lambda sentence: None, path)
    breaks, missing = Fake("breaks"), Fake("missing")
    for one, why in ((breaks, "in the middle"), (missing, "not here")):
        with pytest.raises(ConfigError, match=why):
            all_.start(one, f"fake:{one.what}", order)
    assert Fake.ended == [breaks.mark] and not path.exists()


def test_a_session_that_others_cannot_reach_is_refused_with_the_way(order: Order) -> None:
    near = Order(order.code, False, 1, order.folder)
    one = Fake("2")
    with pytest.raises(ConfigError, match="--tunnel direct"):
        Launches(lambda sentence: None, None).start(one, "fake:2", near)
    assert not Fake.ended


def test_the_next_kernel_ends_what_a_killed_one_left(tmp_path: Path, order: Order) -> None:
    path, told = tmp_path / "s.launched", list[str]()
    killed = Launches(lambda sentence: None, path)
    one = Fake("stays")
    killed.start(one, "fake:stays", order)
    assert json.loads(path.read_text()) == [{"text": "fake:stays", "mark": one.mark}]
    assert order.code.encode() not in path.read_text()
    Launches(told.append, path).end()
    assert Fake.ended == [one.mark] and f"carries the mark {one.mark}): one is still there" in told[0]
    killed._ended.set()


@pytest.mark.parametrize("content", ["", "no json", "[1]", '[{"text": "fake:2"}]', '{"text": "x"}'])
def test_a_damaged_note_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s.launched"
    path.write_text(content)
    Launches(lambda sentence: None, path).end()
    assert Fake.ended == []


def test_one_launcher_that_cannot_be_told_does_not_keep_the_code_from_the_next(order: Order) -> None:
    told: list[str] = []
    all_ = Launches(told.append, None)
    deaf, other = Fake("deaf"), Fake("2")
    for one in (deaf, other):
        all_.start(one, f"fake:{one.what}", order)
    all_.follow(order.code)
    assert other.codes == [order.code] and any("were not told the new join code: deaf" in line for line in told)
    all_.end()


@pytest.mark.parametrize(
    "mark",
    [
        "x/ {system(\"id\")} /'; touch x; '",
        "guava-0123456789$(id)",
        "guava-",
        "",
        "-f",
        "guava-0123456789\n",
        "other-name",
    ],
)
def test_a_mark_that_was_not_made_here_reaches_no_command(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "s.launched"
    path.write_text(json.dumps([{"text": "fake:2", "mark": mark}, {"text": "fake:2", "mark": "guava-0123456789"}] * 2))
    path.chmod(0o600)
    Launches(lambda sentence: None, path).end()
    assert Fake.ended == ["guava-0123456789"]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner and no mode here")
def test_a_note_that_others_may_have_written_is_none_and_ours_is_closed_to_them(tmp_path: Path, order: Order) -> None:
    path = tmp_path / "s.launched"
    before = os.umask(0o002)
    try:
        killed = Launches(lambda sentence: None, path)
        killed.start(Fake("2"), "fake:2", order)
        killed._ended.set()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(0o620)
    Launches(lambda sentence: None, path).end()
    assert Fake.ended == []
    path.chmod(0o600)
    Launches(lambda sentence: None, path).end()
    assert len(Fake.ended) == 1
