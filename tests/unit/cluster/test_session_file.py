"""A session's file: what is written comes back, only for its user, and for one process at a time."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from guava_nb.cluster import session_file
from guava_nb.cluster.session_file import SavedSession, SessionFile
from guava_nb.config.state_folder import state_folder, write_private
from guava_nb.errors import ConfigError
from guava_nb.transport.certificate import self_signed_certificate


def saved(port: int = 4711) -> SavedSession:
    certificate = self_signed_certificate()
    return SavedSession(b"s" * 16, certificate.pem, certificate.key, port)


def test_what_was_saved_comes_back_and_is_its_users_alone(tmp_path: Path) -> None:
    file = SessionFile.take(tmp_path / "deep" / "one.json")
    assert file.load() is None
    session = saved()
    file.save(session)
    assert file.load() == session
    pinned = session.pinned()
    assert pinned is not None and pinned.fingerprint16 and pinned.server_context()
    assert file.path.stat().st_mode & 0o077 == 0
    file.release(forget=False)
    again = SessionFile.take(file.path)
    assert again.path == file.path and again.load() == session
    again.release(forget=True)
    assert not file.path.exists()


@pytest.mark.parametrize("name", ["one", "one.session", "one.dat", "one.two.json", ".one"])
def test_what_was_written_is_deleted_and_nothing_else_whatever_its_name(name: str, tmp_path: Path) -> None:
    others = {tmp_path / "one.json", tmp_path / "one.txt"} - {tmp_path / name}
    for other in others:
        other.write_text("mine")
    files = [SessionFile.take(tmp_path / name) for _ in range(2)]
    for file in files:
        file.save(saved())
        file.note_local(["local-1"])
        file.release(forget=True)
    left = {path for path in tmp_path.iterdir() if path.suffix != ".lock"}
    assert left == others and all(path.read_text() == "mine" for path in others)


@pytest.mark.parametrize("suffix", [".lock", ".probe", ".run", ".steps", ".launched", ".local", ".status"])
def test_a_name_of_a_file_beside_it_is_refused(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"files that end in {suffix} lie beside it"):
        SessionFile.take(tmp_path / f"one{suffix}")
    assert not list(tmp_path.iterdir())


def test_workers_that_ended_with_their_process_are_known_until_the_session_ends(tmp_path: Path) -> None:
    file = SessionFile.take(tmp_path / "one.json")
    assert file.local() == []
    file.note_local(["local-1", "local-2"])
    file.release(forget=False)
    again = SessionFile.take(file.path)
    again.note_local(["local-1"])
    assert again.local() == ["local-1", "local-2"]
    again.release(forget=True)
    assert not list(tmp_path.glob("*.local"))


def test_without_tls_there_is_no_certificate(tmp_path: Path) -> None:
    file = SessionFile.take(tmp_path / "one.json")
    file.save(SavedSession(b"s" * 16, b"", b"", 1))
    loaded = file.load()
    assert loaded is not None and loaded.pinned() is None
    file.release(forget=True)


HOLD = """
import sys
from pathlib import Path
from guava_nb.cluster import session_file
from guava_nb.cluster.session_file import SessionFile
held = SessionFile.take(Path(sys.argv[1]))
print(held.path.name, flush=True)
sys.stdin.read()
"""


def test_another_process_gets_another_file_until_the_first_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    try:
        assert first.stdout.readline().strip() == "one.json"
        second, third = SessionFile.take(path), SessionFile.take(path)
        assert (second.path.name, third.path.name) == ("one-2.json", "one-3.json")
        second.release(forget=True)
        third.release(forget=True)
    finally:
        first.kill()  # a lock ends with its process, however that ends
        first.communicate()
    again = SessionFile.take(path)
    assert again.path.name == "one.json"
    again.release(forget=True)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"secret":"c3M=","certificate":"","key":"","port":1}'])
def test_a_damaged_file_is_as_none(tmp_path: Path, damage: bytes) -> None:
    file = SessionFile.take(tmp_path / "one.json")
    file.save(saved())
    file.path.write_bytes(damage)
    assert file.load() is None and f"{file.path}, cannot be read" in file.problem
    file.save(SavedSession(b"s" * 16, b"no certificate", b"", 1))
    assert file.load() is None
    file.save(SavedSession(b"s" * 16, b"", b"", 1, version=9))
    assert file.load() is None and "is of version 9, and this guava_nb reads version 1" in file.problem
    file.release(forget=True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_without_room_is_refused_before_anything_begins(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(session_file, "write_private", full)
        with pytest.raises(ConfigError, match=os.strerror(number)):
            SessionFile.take(tmp_path / "one.json")
    file = SessionFile.take(tmp_path / "one.json")  # what was begun there holds nothing
    assert file.path.name == "one.json"
    file.release(forget=True)


@pytest.mark.skipif(sys.platform == "win32", reason="locks of POSIX")
def test_a_drive_without_locks_is_not_taken_for_one_that_others_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", none)
    with pytest.raises(ConfigError, match="No locks available"):
        SessionFile.take(tmp_path / "one.json")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="session_file .* cannot be written"):
        SessionFile.take(tmp_path / "file" / "one.json")


@pytest.mark.parametrize("content", [b"", b"\\documentclass{article}", b"{}", b'{"cells": []}'])
def test_a_file_that_is_no_session_file_is_refused_and_stays_as_it_is(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "thesis.tex"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(
        ConfigError, match="exists and is no session file, so it is left as it is: name a file that does not exist yet"
    ):
        SessionFile.take(path)
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]
    path.unlink()
    path.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="is no session file"):
        SessionFile.take(path)


def test_a_file_of_the_user_where_a_second_session_would_lie_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "one-2.json").write_text("mine")
    (tmp_path / "one-2.json").chmod(0o600)
    files = [SessionFile.take(tmp_path / "one.json") for _ in range(2)]
    assert [file.path.name for file in files] == ["one.json", "one-3.json"]
    for file in files:
        file.release(forget=True)
    assert (tmp_path / "one-2.json").read_text() == "mine"


def test_a_damaged_file_in_our_own_folder_makes_room_for_a_new_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    before = SessionFile.take(state_folder() / "session-1.json")
    write_private(before.path, b"damaged")
    before.release(forget=False)
    file = SessionFile.take(state_folder() / "session-1.json")
    assert file.load() is None and "cannot be read" in file.problem
    file.release(forget=True)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner and no mode here")
@pytest.mark.parametrize(
    ("suffix", "bits", "why"),
    [
        (".json", 0o640, "other users may read it"),
        (".json", 0o602, "other users may write it"),
        (".launched", 0o620, "other users may write it"),
        (".local", 0o620, "other users may write it"),
        (".run", 0o620, "other users may write it"),
        (".json", 0o600, "another user owns it"),
        (".steps", 0o600, "another user owns it"),
    ],
)
def test_a_file_that_others_may_have_made_or_seen_is_refused(
    suffix: str, bits: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SessionFile.take(tmp_path / "one.json")
    file.save(saved())
    file.release(forget=False)
    one = tmp_path / f"one{suffix}"
    one.touch()
    one.chmod(bits)
    before = one.read_bytes()
    if bits == 0o600:
        monkeypatch.setattr(os, "getuid", lambda: one.stat().st_uid + 1)
        if suffix != ".json":
            file.path.unlink()
    with pytest.raises(ConfigError, match=f"one{suffix} exists, and {why}"):
        SessionFile.take(tmp_path / "one.json")
    assert one.read_bytes() == before
