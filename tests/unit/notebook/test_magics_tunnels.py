"""%guava_up --tunnel, and a worker's notebook whose session went away: codes, interrupts, what is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.errors import ConfigError
from guava_nb.protocol.joincode import JoinCode
from tests.support.fake_session import SECRET_CODE, FakeOrchestrator, FakeRun

NEW = JoinCode.decode(SECRET_CODE).with_address("two.example", 7).encode()
OTHER = JoinCode.new("127.0.0.1", 4242, b"f" * 16, b"another 16 bytes").encode()


@pytest.fixture(autouse=True)
def no_token_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pyngrok read the environment anew: it keeps for the whole process what that had at first."""
    from pyngrok import conf

    monkeypatch.setattr(conf, "_default_pyngrok_config", None)


def opened(notebook: Any) -> list[str]:
    return [tunnel for name, (tunnel, _) in notebook.orchestrator.calls if name == "open"]


def test_the_tunnel_is_chosen_on_the_line_and_may_be_changed_on_an_open_session(notebook: Any) -> None:
    shown = notebook.run("%guava_up --tunnel ssh:me@lab.example:7000")
    assert shown.ok and "ssh:me@lab.example:7000" in shown.text and SECRET_CODE in shown.text
    assert notebook.run("%guava_up").ok and len(notebook.orchestrators) == 1
    assert notebook.run("%guava_up --tunnel ngrok").ok
    assert opened(notebook) == ["ssh:me@lab.example:7000", "ngrok"] and len(notebook.orchestrators) == 1


def test_the_code_is_shown_although_all_workers_are_local_when_a_tunnel_is_wanted(notebook: Any) -> None:
    assert SECRET_CODE not in notebook.run("%guava_up --local 1").text
    assert SECRET_CODE in notebook.run("%guava_up --local 1 --tunnel local").text


def test_a_session_that_only_dials_gets_no_listener_by_running_again(notebook: Any) -> None:
    notebook.run(f"%guava_up --connect {SECRET_CODE}")
    notebook.orchestrator.open = lambda *_: pytest.fail("nobody asked for it")
    assert notebook.run("%guava_up --connect " + SECRET_CODE).ok


def test_tab_offers_the_tunnels_and_help_shows_one(notebook: Any) -> None:
    assert {"ngrok", "ngrok-http"} == set(notebook.complete("%guava_up --tunnel ng"))
    assert "ssh" in notebook.complete("%guava_up --tunnel ")
    shown = notebook.run("%guava_up -h").text
    assert "--tunnel NAME[:WHAT]" in shown and "%guava_up --tunnel ngrok" in shown


def test_the_token_is_asked_for_without_echo(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook.run("%guava_up --tunnel ngrok")
    assert dict(notebook.orchestrator.calls)["open"][1] is None, "nobody can be asked in a test without a terminal"
    notebook.run("%guava_down")
    monkeypatch.setattr(notebook.shell, "kernel", SimpleNamespace(_allow_stdin=True), raising=False)
    monkeypatch.delenv("NGROK_AUTHTOKEN")
    asked: list[str] = []
    monkeypatch.setattr("guava_nb.notebook.display.getpass.getpass", lambda text: asked.append(text) or "3" * 40)
    notebook.run("%guava_up --tunnel ngrok")
    assert dict(notebook.orchestrator.calls)["open"][1]() == "3" * 40
    assert len(asked) == 1 and "ngrok" in asked[0], "once, before torch is loaded"


@pytest.mark.parametrize(
    ("tunnel", "token", "words"),
    [
        ("ngrok", "", "ngrok needs an authtoken, and none was found"),
        ("ngrok-http", "", "ngrok needs an authtoken, and none was found"),
        ("ngrok", "wrong", "copy it from https://dashboard.ngrok.com"),
        ("cloudflard", "", 'Did you mean "cloudflared"?'),
    ],
)
def test_a_tunnel_that_cannot_start_is_refused_before_torch_is_loaded(
    notebook: Any, monkeypatch: pytest.MonkeyPatch, tunnel: str, token: str, words: str
) -> None:
    monkeypatch.setenv("NGROK_AUTHTOKEN", token)
    shown = notebook.run(f"%guava_up --tunnel {tunnel}")
    assert not shown.ok and words in shown.text and not notebook.orchestrators


def test_a_new_code_of_the_same_session_leads_the_worker_there(notebook: Any) -> None:
    notebook.worker_options = {"num_waits": 8}
    notebook.run(f"%guava_worker {SECRET_CODE} --detach")
    again = notebook.run(f"%guava_worker {NEW} --detach")
    (worker,) = notebook.workers
    assert worker.calls == ["redirect two.example:7"] and "dials its session at two.example:7" in again.text
    assert NEW not in again.text and SECRET_CODE not in again.text
    same = notebook.run(f"%guava_worker {NEW} --detach")
    assert "in that session already" in same.text and len(worker.calls) == 1
    worker.away = True
    assert notebook.run("%guava_worker --detach").ok, "without a code it dials on where it was told last"
    assert worker.calls[1:] == ["redirect two.example:7"]


@pytest.mark.parametrize("code", [OTHER, NEW[:-9]])
def test_a_code_of_another_session_or_a_cut_one_changes_nothing(notebook: Any, code: str) -> None:
    notebook.run(f"%guava_worker {SECRET_CODE} --detach")
    refused = notebook.run(f"%guava_worker {code} --detach")
    assert not refused.ok and code not in refused.text and notebook.workers[0].calls == []
    assert "another session already" in refused.text or "cut off" in refused.text


def test_an_interrupt_while_the_session_is_away_gives_the_cell_back_and_leaves_the_worker_be(notebook: Any) -> None:
    notebook.worker_options = {"num_waits": 9, "interrupt_at": (2,), "away": True}
    shown = notebook.run(f"%guava_worker {SECRET_CODE}")
    (worker,) = notebook.workers
    assert shown.ok and worker.alive and worker.calls == [], "an error would drop a queued cell with the new code"
    assert "%guava_worker NEWCODE" in shown.lines[-1] and "Traceback" not in shown.text, "the last line says how on"
    assert "cut short" not in shown.text
    went_on = notebook.run(f"%guava_worker {NEW}")
    assert went_on.ok and worker.calls == ["redirect two.example:7"] and not worker.alive
    assert "It waits: interrupt its cell" not in went_on.text


def test_a_worker_without_a_tunnel_is_sent_for_no_code_and_leaves_on_interrupt(notebook: Any) -> None:
    notebook.worker_options = {"num_waits": 9, "interrupt_at": (2,), "away": True, "away_because": "it broke"}
    shown = notebook.run(f"%guava_worker {SECRET_CODE}")
    assert shown.ok and notebook.workers[0].calls == ["leave"] and "NEWCODE" not in shown.text
    assert "You need to do nothing here" in shown.text


def test_the_worker_says_when_its_session_is_back_and_its_end_once(
    notebook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("guava_nb.notebook.panel.surfaces.LineSurface.interval_s", 0.0)
    notebook.worker_options = {"num_waits": 9, "away": True, "back_at": 4, "detail": "it was asked to leave"}
    shown = notebook.run(f"%guava_worker {SECRET_CODE}")
    assert shown.ok and shown.text.count("The connection to the session is back") == 1
    assert shown.text.index("It waits: interrupt") < shown.text.index("is back")
    assert shown.lines[-1] == "it was asked to leave" and "worker worker-0: left" in shown.lines[-2]


def test_a_new_code_is_shown_in_the_cell_that_trains(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook.run("%guava_up --local 1 --tunnel ngrok\nloader = []")
    codes = iter([SECRET_CODE] * 2 + [NEW] * 99)
    monkeypatch.setattr(notebook.magics.session, "join_code", lambda: next(codes))
    monkeypatch.setattr(notebook.magics.session, "cell_to_paste", lambda: f"%guava_worker {NEW}")
    monkeypatch.setattr("guava_nb.notebook.panel.surfaces.LineSurface.interval_s", 0.0)
    shown = notebook.run("%guava_train --model Net --data loader --loss CrossEntropyLoss --optimizer Adam")
    assert shown.ok and shown.text.count(f"%guava_worker {NEW}") == 1
    assert "Workers that are away need it" in shown.text and "need nothing" in shown.text


@pytest.mark.parametrize("tail", ["--devise cpu", "--nmae foo", "--detahc"])
def test_a_misspelt_option_behind_the_code_is_refused(notebook: Any, tail: str) -> None:
    shown = notebook.run(f"%guava_worker {SECRET_CODE} {tail}")
    assert not shown.ok and not notebook.workers
    assert f"has no option {tail.split()[0]}; did you mean --" in shown.text and SECRET_CODE not in shown.text


def test_a_join_that_fails_says_why_and_who_knows_more(notebook: Any) -> None:
    failed = {"num_waits": 1, "last_state": "failed", "joined": False, "detail": "a.b:1 did not answer"}
    notebook.worker_options = {**failed, "error": "LinkTimeout"}
    (last,) = notebook.run(f"%guava_worker {SECRET_CODE}").lines[-1:]
    assert last == "ClusterError: worker did not join: a.b:1 did not answer; %guava_doctor CODE says which step fails"
    notebook.worker_options = {**failed, "error": "ConfigError"}
    assert notebook.run(f"%guava_worker {SECRET_CODE}").lines[-1].endswith(": a.b:1 did not answer")
    assert "worker :" not in notebook.run("%guava_status").text


def test_what_must_be_done_for_the_tunnel_stands_above_the_cell_to_paste(notebook: Any) -> None:
    notebook.run("%guava_up --tunnel ssh:lab")
    notebook.orchestrator.tunnel_note = "run ssh -N -L there"
    shown = notebook.run("%guava_up").text
    assert shown.count("run ssh -N -L there") == 1 and shown.index("run ssh") < shown.index(SECRET_CODE)
    assert "run ssh -N -L there" in notebook.run("%guava_status").text


def test_training_waits_also_when_the_only_worker_has_left(notebook: Any) -> None:
    notebook.run("%guava_up --local 1\nloader = []")
    train = "%guava_train --model Net --loss CrossEntropyLoss --data loader"
    assert notebook.run(train).ok
    notebook.orchestrator.next_run = FakeRun()
    assert "Waiting" not in notebook.run(train).text
    notebook.orchestrator.next_run = FakeRun()
    notebook.orchestrator.here, notebook.orchestrator.coming = [], ["back"]
    shown = notebook.run(train)
    assert shown.ok and "Waiting up to 300 s for workers: 0 of 1 are here" in shown.text


@pytest.mark.parametrize(
    "line",
    [
        "%guava_train --model Net --data loader --loss CrossEntropyLoss",
        "%guava_validate --data loader",
        "%guava_predict --data loader",
    ],
)
def test_a_new_code_is_shown_in_whatever_cell_waits(notebook: Any, line: str) -> None:
    notebook.run("%guava_up --workers 2 --tunnel ngrok\nloader = [1]")
    orchestrator = notebook.orchestrator

    def another_address() -> None:
        orchestrator.code = NEW

    orchestrator.waiting, orchestrator.coming = another_address, ["late", "later"]
    shown = notebook.run(line)
    assert shown.ok and shown.text.count(f"%guava_worker {NEW}") == 1
    assert "Workers that are away need it" in shown.text


def test_the_cell_brings_the_package_along_where_others_are_reached(notebook: Any) -> None:
    here = notebook.run("%guava_up --workers 1").text
    assert f"%load_ext guava_nb\n    %guava_worker {SECRET_CODE}" in here and "guava_nb_cell" not in here
    notebook.run("%guava_down")
    reached = notebook.run("%guava_up --workers 1 --tunnel ngrok").text
    assert "    guava_nb_cell()\n    %load_ext guava_nb\n" in reached


def test_a_package_that_was_never_installed_is_said_in_the_cell(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def worker_cell(orchestrator: Any) -> str:
        raise ConfigError("guava_nb was never installed")

    monkeypatch.setattr(FakeOrchestrator, "worker_cell", worker_cell)
    shown = notebook.run("%guava_up --workers 1 --tunnel ngrok").text
    assert (
        "    # Install guava_nb here first, from the same place as there: guava_nb was never installed\n    %load_ext"
        in shown
    )
