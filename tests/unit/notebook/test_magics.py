"""Every magic through a real shell over fakes."""

from __future__ import annotations

import inspect
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guava_nb import errors
from guava_nb.evaluation.predictions import Predictions
from guava_nb.notebook import commands, magics
from guava_nb.notebook.host import Host
from guava_nb.notebook.magics import GuavaMagics, load, unload
from guava_nb.protocol.joincode import JoinCode
from tests.support.fake_session import SECRET_CODE, FakeRun

NAMES = [command.name for command in commands.COMMANDS]
TRAIN = "%guava_train --model Net --loss CrossEntropyLoss --data loader"


def line_of(name: str, rest: str) -> str:
    return f"%{name} {rest}"


# ------------------------------------------------------------------------------------------------- manners of all


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flag", ["-h", "--help", "--nonsense -h"])
def test_help_is_printed_and_nothing_is_done(notebook: Any, name: str, flag: str) -> None:
    shown = notebook.run(line_of(name, flag))
    assert shown.ok
    assert f"guava_{name.removeprefix('guava_')}" in shown.text
    assert "Traceback" not in shown.text
    assert not notebook.orchestrators
    assert not notebook.workers


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_one_line(notebook: Any, name: str) -> None:
    shown = notebook.run(line_of(name, "--hepl"))
    assert not shown.ok
    assert len(shown.lines) == 1
    assert "did you mean --help?" in shown.text


@pytest.mark.parametrize("name", NAMES)
def test_nothing_on_the_line_is_an_answer_or_one_line(notebook: Any, name: str) -> None:
    shown = notebook.run(line_of(name, "# only a comment"))
    assert "Traceback" not in shown.text
    assert shown.ok or len(shown.lines) == 1


@pytest.mark.parametrize("name", NAMES)
def test_question_mark_shows_the_help(notebook: Any, name: str) -> None:
    assert notebook.magics.shell.find_magic(name).__doc__.startswith("usage:")


@pytest.mark.parametrize("command", commands.COMMANDS, ids=lambda command: command.name)
def test_the_help_says_of_each_option_what_counts_where_it_is_left_out(command: Any) -> None:
    shown = re.split(r"\n  (?=-)", command.help())[1:]
    for entry in command.options:
        name = entry.flags[0]
        if name.startswith("-") and entry.takes_value and not entry.settings.get("required"):
            (told,) = [text for text in shown if re.match(rf"{name}\b(?!-)", text)]
            told = " ".join(told.split())
            assert "default" in told or name.lstrip("-") in command.one_of, told
            assert "None" not in told and "False" not in told, told


def test_every_magic_of_the_table_exists_and_is_short() -> None:
    for name in NAMES:
        method = inspect.unwrap(getattr(GuavaMagics, name))
        assert len(inspect.getsource(method).splitlines()) <= 15 + 3, name  # decorators and docstring beside the body


@pytest.mark.parametrize(
    "error_class",
    [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.GuavaError)],
)
def test_each_error_of_ours_is_shown_without_a_traceback(
    notebook: Any, monkeypatch: pytest.MonkeyPatch, error_class: type[errors.GuavaError]
) -> None:
    error = (
        error_class("w0", "ValueError", "bad") if error_class is errors.RemoteError else error_class("what went wrong")
    )

    def fail() -> None:
        raise error

    monkeypatch.setattr(notebook.magics.session, "stop", fail)
    shown = notebook.run("%guava_stop")
    assert not shown.ok
    assert len(shown.lines) == 1
    assert error_class.__name__ in shown.text


def test_an_interrupt_anywhere_is_one_line_and_fails_the_cell(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(notebook.magics.session, "stop", interrupted)
    shown = notebook.run("%guava_stop")
    assert not shown.ok
    assert len(shown.lines) == 1
    assert "cut short" in shown.text


# -------------------------------------------------------------------------------------------------------- going up


def test_up_shows_the_code_and_the_cell_to_run(notebook: Any) -> None:
    shown = notebook.run("%guava_up --workers 2 --port 4242 --no-tls # with a comment")
    assert shown.ok
    assert f"    %guava_worker {SECRET_CODE}" in shown.text.splitlines()
    assert "secret" in shown.text
    assert "127.0.0.1:4242" in shown.text
    assert shown.value is None
    assert notebook.orchestrator.settings == {"master_port": 4242, "num_workers": 2, "tls": False}


def test_up_twice_is_the_same_session(notebook: Any) -> None:
    first, second = notebook.run("%guava_up --workers 2"), notebook.run("%guava_up --workers 2")
    assert len(notebook.orchestrators) == 1
    assert first.text == second.text
    assert "%guava_down" in second.text


def test_up_again_with_other_settings_says_that_they_did_not_change(notebook: Any) -> None:
    notebook.run("%guava_up --workers 2")
    shown = notebook.run("%guava_up --workers 2 --port 9")
    assert "--port did not change" in shown.text
    assert len(notebook.orchestrators) == 1


def test_the_number_of_workers_may_change_and_the_next_run_waits_for_them(notebook: Any) -> None:
    notebook.run("%guava_up --local 1\nloader = []")
    assert notebook.run(TRAIN).ok
    assert "The next run waits for 2 workers, before for 1." in notebook.run("%guava_up --workers 2").text
    assert "The next run" not in notebook.run("%guava_up --workers 2").text
    assert notebook.run(TRAIN).ok
    assert [call for call in notebook.orchestrator.calls if call[0] == "wait"][-1] == ("wait", None)
    waits = len([call for call in notebook.orchestrator.calls if call[0] == "wait"])
    assert notebook.run(TRAIN).ok, "a later run takes who is there"
    assert len([call for call in notebook.orchestrator.calls if call[0] == "wait"]) == waits


def test_without_a_tunnel_the_code_is_said_to_work_here_only(notebook: Any) -> None:
    here = "works on this machine only"
    assert here in notebook.run("%guava_up --workers 2").text
    assert here not in notebook.run("%guava_up --tunnel ngrok").text
    notebook.orchestrator.tunnel = ""
    notebook.orchestrator.code = JoinCode.new("192.168.1.5", 4242).encode()
    assert here not in notebook.run("%guava_up").text
    notebook.run("%guava_down")
    assert here not in notebook.run("%guava_up --local 2").text


def test_the_code_of_this_very_notebook_is_refused_with_advice(notebook: Any) -> None:
    notebook.run("%guava_up --workers 2")
    shown = notebook.run(f"%guava_worker {SECRET_CODE}")
    assert not shown.ok and len(shown.lines) == 1 and "%guava_up --local 1" in shown.text and not notebook.workers
    other = JoinCode.new("127.0.0.1", 4242).encode()
    assert notebook.run(f"%guava_worker {other} --detach").ok and len(notebook.workers) == 1


def test_up_dials_a_listening_worker_instead_of_listening(notebook: Any) -> None:
    shown = notebook.run(f"%guava_up --connect {SECRET_CODE} --workers 2")
    assert shown.ok, shown.text
    [(name, (code,))] = notebook.orchestrator.calls
    assert (name, JoinCode.decode(code).port) == ("connect", 4242)
    assert (
        "listener-1 is connected" in shown.text and SECRET_CODE not in shown.text and "%guava_worker" not in shown.text
    )
    assert notebook.run(f"%guava_up {SECRET_CODE}").ok  # a further one
    assert len(notebook.orchestrators) == 1 and len(notebook.orchestrator.calls) == 2
    nothing = notebook.run("%guava_up --connect")
    assert not nothing.ok and len(nothing.lines) == 1 and "needs the join code" in nothing.text


def test_up_asks_for_the_code_of_a_listening_worker_and_leaves_none_in_the_environment(
    notebook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("getpass.getpass", lambda prompt: SECRET_CODE)
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    shown = notebook.run("%guava_up --connect")
    assert shown.ok and SECRET_CODE not in shown.text and "listener-1 is connected" in shown.text
    monkeypatch.setattr("getpass.getpass", lambda prompt: "")
    monkeypatch.setenv("GUAVA_JOIN_CODE", SECRET_CODE)
    assert notebook.run("%guava_up --connect").ok and "GUAVA_JOIN_CODE" not in os.environ
    assert [call[1] for call in notebook.orchestrator.calls] == [(SECRET_CODE,)] * 2


def test_local_workers_are_started_once_and_need_no_code(notebook: Any) -> None:
    first = notebook.run("%guava_up --local 2")
    notebook.run("%guava_up --local 2")
    assert [call for call in notebook.orchestrator.calls if call[0] == "launch"] == [("launch", 2)]
    assert SECRET_CODE not in first.text
    assert "2 ready of 2" in first.text
    assert SECRET_CODE in notebook.run("%guava_up --local 2 --show-code").text
    notebook.run("%guava_up --local 3")
    assert [call for call in notebook.orchestrator.calls if call[0] == "launch"] == [("launch", 2), ("launch", 1)]


def test_too_few_local_workers_is_one_line_and_the_session_stays(notebook: Any) -> None:
    notebook.too_few = True
    shown = notebook.run("%guava_up --local 2")
    assert not shown.ok
    starting, error = shown.lines
    assert starting.startswith("Starting 2 workers here") and error.startswith("RendezvousTimeout")
    assert notebook.run("%guava_status").text.startswith("session: open")


def test_up_again_waits_for_slow_local_workers_and_replaces_dead_ones(notebook: Any) -> None:
    notebook.too_few = True
    notebook.run("%guava_up --local 2")
    assert "1 of 2 workers joined" in notebook.run("%guava_up --local 2").text
    notebook.orchestrator.too_few = False
    notebook.orchestrator.local[0].alive = False
    notebook.orchestrator.coming.remove("worker-0")
    assert notebook.run("%guava_up --local 2").ok
    assert [call for call in notebook.orchestrator.calls if call[0] == "launch"] == [("launch", 2), ("launch", 1)]


def test_local_workers_beside_others_are_waited_for_and_the_code_is_shown(notebook: Any) -> None:
    notebook.run("%guava_up --workers 2")
    notebook.orchestrator.here = ["colab", "kaggle"]
    notebook.orchestrator.newcomers = ["late"]
    shown = notebook.run("%guava_up --local 2")
    assert notebook.orchestrator.here == ["colab", "kaggle", "late", "worker-0", "worker-1"]
    assert "5 ready, 2 expected" in shown.text
    assert "All workers are local" not in shown.text and SECRET_CODE in shown.text
    assert "did not change" not in shown.text, "--workers was not given"
    notebook.orchestrator.here = ["worker-0", "worker-1"]
    assert "All workers are local" in notebook.run("%guava_up --local 2").text


def test_a_local_worker_alone_in_a_session_for_more_leaves_the_code_visible(notebook: Any) -> None:
    assert SECRET_CODE in notebook.run("%guava_up --workers 2 --local 1").text
    shown = notebook.run("%guava_up --local 2")
    assert "All workers are local" in shown.text
    for worker in notebook.orchestrator.local:
        worker.alive = False
    notebook.orchestrator.here.clear()
    lonely = notebook.run("%guava_up --local 1")
    assert "All workers are local" in lonely.text and SECRET_CODE not in lonely.text, "those that died are no others"
    assert lonely.lines[0] == "Starting 1 worker here; this takes some seconds."
    assert "The next run waits for 3 workers, before for 2." in notebook.run("%guava_up --workers 3 --local 2").text


def test_more_local_workers_than_expected_is_refused(notebook: Any) -> None:
    shown = notebook.run("%guava_up --local 3 --workers 2")
    assert len(shown.lines) == 1
    assert not notebook.orchestrators


def test_an_orchestrator_closed_from_python_is_replaced(notebook: Any) -> None:
    notebook.run("%guava_up")
    notebook.orchestrator.close()
    assert "run %guava_up first" in notebook.run("%guava_save x.pt").text
    notebook.run("%guava_up")
    assert len(notebook.orchestrators) == 2


# ----------------------------------------------------------------------------------------------------------- cells


def test_share_runs_here_then_travels(notebook: Any) -> None:
    notebook.run("%guava_up")
    shown = notebook.run("%%guava_share --name model # the net\nwidth = 3\nclass Net: pass")
    assert shown.text.strip() == "Cell model is shared."
    assert notebook.shell.user_ns["width"] == 3
    assert notebook.orchestrator.cells == {"model": "width = 3\nclass Net: pass\n"}


def test_cells_shared_before_up_and_before_a_second_up_travel_too(notebook: Any) -> None:
    assert "as soon as" in notebook.run("%%guava_share\nclass Net: pass").text
    notebook.run("%guava_up")
    assert list(notebook.orchestrator.cells) == ["Net"]
    notebook.run("%guava_down")
    notebook.run("%guava_up")
    assert list(notebook.orchestrator.cells) == ["Net"]


def test_a_refused_early_cell_is_told_at_up_and_does_not_stop_it(notebook: Any) -> None:
    notebook.run("%%guava_share --name bad\ntext = '''\n!pip install x\n'''")
    shown = notebook.run("%guava_up")
    assert shown.ok
    assert "Cell bad is not shared: cell bad, line 1" in shown.text


def test_a_cell_that_fails_here_is_not_shared(notebook: Any) -> None:
    notebook.run("%guava_up")
    shown = notebook.run("%%guava_share --name model\n1 / 0")
    assert not shown.ok
    assert "ZeroDivisionError" in shown.text
    assert shown.lines[-1] == "UsageError: cell model is not shared: it failed here with ZeroDivisionError"
    assert notebook.orchestrator.cells == {}


def test_the_newest_text_of_a_rerun_cell_counts(notebook: Any) -> None:
    notebook.run("%guava_up")
    for width in (1, 2):
        notebook.run(f"%%guava_share\nclass Net:\n    width = {width}")
    assert notebook.orchestrator.cells == {"Net": "class Net:\n    width = 2\n"}


def test_a_cell_can_be_taken_back(notebook: Any) -> None:
    notebook.run("%%guava_share --name early\nclass Early: pass")
    notebook.run("%guava_up")
    notebook.run("%%guava_share --name broken\nclass Broken: pass")
    assert set(notebook.orchestrator.cells) == {"early", "broken"}
    assert notebook.complete("%guava_share --forget br") == ["broken"]
    assert "did you mean broken? Shared: early, broken" in notebook.run("%guava_share --forget brokn").text
    shown = notebook.run("%guava_share --forget broken")
    assert shown.ok and shown.text.strip() == "Cell broken is shared no longer; what it defined stays in this notebook."
    assert set(notebook.orchestrator.cells) == {"early"}
    notebook.run("%guava_share --forget early")
    assert notebook.orchestrator.cells == {} and "Shared: none" in notebook.run("%guava_share --forget early").text
    for wrong in ("%%guava_share --forget early\nx = 1", "%guava_share --forget early --name x"):
        assert "stands alone" in notebook.run(wrong).text


def test_braces_and_dollars_of_a_cell_are_left_alone(notebook: Any) -> None:
    notebook.run("%guava_up\nx = 5")
    notebook.run("%%guava_share --name c\ntable = {x: '$x {x}'}")
    assert notebook.orchestrator.cells["c"] == "table = {x: '$x {x}'}\n"


def test_the_line_form_of_share_says_what_to_do(notebook: Any) -> None:
    assert "two percent signs" in notebook.run("%guava_share").text


# -------------------------------------------------------------------------------------------------------- training


def test_train_passes_on_what_was_given_and_nothing_else(notebook: Any) -> None:
    notebook.run("%guava_up --local 1\nloader, loaders = [1], {'val': [2]}\nwidth = 8")
    shown = notebook.run(
        TRAIN + ' --model-args {"width": $width, "deep": true} --val loaders["val"] --epochs 2 --optimizer AdamW '
        "--optimizer-args {'betas': (0.9, 0.99)} --lr 1e-3 --weight-decay=0 --scheduler StepLR --scheduler-args "
        "'{\"step_size\": 3}' --scheduler-interval epoch --clip 1 --accumulate 2 --precision bf16 --val-interval 4 "
        "--seed 7 --shares 2,1 --optimizer-site orchestrator --cache disk --resume a.pt -o my_run  # done"
    )
    assert shown.ok, shown.text
    assert ("model", ("Net", {"width": 8, "deep": True})) in notebook.orchestrator.calls
    assert notebook.orchestrator.calls[-1] == ("train", {
        "train_loader": [1], "val_loader": [2], "criterion": "CrossEntropyLoss", "num_epochs": 2, "optimizer": "AdamW",
        "optimizer_args": {"betas": (0.9, 0.99), "lr": 1e-3, "weight_decay": 0.0}, "scheduler": "StepLR",
        "scheduler_args": {"step_size": 3}, "scheduler_interval": "epoch", "max_grad_norm": 1.0,
        "accumulation_steps": 2, "precision": "bf16", "val_interval": 4, "seed": 7, "shares": (2.0, 1.0),
        "optimizer_site": "orchestrator", "cache": "disk", "resume": Path("a.pt"), "detach": True,
    })  # fmt: skip
    assert notebook.shell.user_ns["my_run"] is shown.value
    notebook.orchestrator.run = None
    notebook.run(f"{TRAIN} --fresh")
    assert notebook.orchestrator.calls[-1] == ("train", {
        "train_loader": [1], "val_loader": None, "criterion": "CrossEntropyLoss", "fresh": True, "detach": True,
    })  # fmt: skip


def test_the_first_run_waits_for_all_expected_workers_and_later_ones_do_not(notebook: Any) -> None:
    notebook.run("%guava_up --workers 2 --local 1\nloader = []")
    assert "Waiting up to 300 s for workers: 1 of 2 are here" in notebook.run(TRAIN).text
    assert notebook.orchestrator.calls[-3] == ("wait", None)
    notebook.orchestrator.next_run = FakeRun()
    assert "Waiting" not in notebook.run(TRAIN).text


def test_a_slip_is_told_before_workers_are_waited_for(notebook: Any) -> None:
    notebook.run("%guava_up --workers 2\nloader = []")
    notebook.orchestrator.refused = errors.ConfigError("model 'Nett' cannot be found")
    told = notebook.run(TRAIN)
    assert "model 'Nett' cannot be found" in told.text and "Waiting" not in told.text
    assert not [call for call in notebook.orchestrator.calls if call[0] in ("wait", "model", "train")]


def test_train_blocks_shows_a_bar_and_a_summary_and_returns_the_run(notebook: Any) -> None:
    notebook.run("%guava_up --local 1\nloader = []")
    shown = notebook.run(f"r = {TRAIN}")
    assert shown.ok
    assert notebook.shell.user_ns["r"] is notebook.orchestrator.run
    assert "done\n  steps       5 in 1 of 1 epochs" in shown.text
    assert "validation" in shown.text
    assert "2 at the start, 0.4 at the end" in shown.text


def test_train_shows_that_it_prepares_before_it_starts_the_run(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook.run("%guava_up --local 1\nloader = [1]")

    def refuse(*args: object, **options: object) -> None:
        raise errors.ConfigError("no")

    monkeypatch.setattr(notebook.orchestrator, "start_training", refuse)
    assert notebook.run("%guava_train --model Net --loss L --data loader").lines == ["ConfigError: no"]
    assert notebook.orchestrator.calls[-1] == ("model", (None, None)), "as before: nothing was trained"
    monkeypatch.setattr("guava_nb.notebook.notebook_session.choose_ui", lambda shell: "html")
    shown = notebook.run("%guava_train --model Net --loss L --data loader")
    assert not shown.ok and "preparing" in shown.lines[0] and shown.lines[-1] == "ConfigError: no"


def test_workers_lines_reach_the_cell_that_waits_and_are_shown_before_the_error(notebook: Any) -> None:
    notebook.next_run = FakeRun(error=errors.NotFinite("loss is NaN on worker-0 in step 5"))
    notebook.run("%guava_up --local 2\nloader = []")
    printed = notebook.orchestrator.printed
    printed["worker-0"] = ["old line"]
    real_wait = notebook.next_run.wait

    def wait(timeout_s: float) -> bool:
        for name in ("worker-0", "worker-1"):
            printed.setdefault(name, []).append(f"line {notebook.next_run.waits}")
        return real_wait(timeout_s)

    notebook.next_run.wait = wait
    shown = notebook.run(TRAIN)
    assert not shown.ok
    assert "old line" not in shown.text
    for name in ("worker-0", "worker-1"):
        assert [shown.text.count(f"{name} | line {n}") for n in range(5)] == [1] * 5
    assert shown.lines[-1].startswith("NotFinite: loss is NaN")
    assert shown.text.index("line 4") < shown.text.index("NotFinite")


def test_first_interrupt_stops_after_the_step_and_the_next_cell_trains_on(notebook: Any) -> None:
    notebook.next_run = FakeRun(num_steps=50, interrupt_at=(2,))
    notebook.run("%guava_up --local 1\nloader = []")
    before = signal.getsignal(signal.SIGINT)
    for _ in range(20):
        shown = notebook.run(TRAIN)
        assert shown.ok
        assert shown.value.state == "stopped"
        assert "Stopping after this step" in shown.text
        assert "Traceback" not in shown.text
        assert "KeyboardInterrupt" not in shown.text
        assert signal.getsignal(signal.SIGINT) is before
        notebook.orchestrator.next_run = FakeRun(num_steps=50, interrupt_at=(2,))


def test_second_interrupt_aborts_now(notebook: Any) -> None:
    run = notebook.next_run = FakeRun(num_steps=50, raise_at=(2, 3))
    notebook.run("%guava_up --local 1\nloader = []")
    shown = notebook.run(TRAIN)
    assert shown.ok
    assert run.interrupts == 2
    assert "Aborting the step now" in shown.text


def test_detach_returns_at_once_and_stop_ends_it(notebook: Any) -> None:
    notebook.run("%guava_up --local 1\nloader = []")
    shown = notebook.run(f"{TRAIN} --detach")
    assert shown.value.waits == 0
    assert "a run is going on" in notebook.run(TRAIN).text
    assert "training, epoch 1/1" in notebook.run("%guava_status").text
    shown.value.num_steps, shown.value.interrupt_at = 50, (1,)
    followed = notebook.run("%guava_status --follow")
    assert "goes on; %guava_stop ends it" in followed.text and not shown.value.done and not shown.value.interrupts
    assert "Stopping after this step" in notebook.run("%guava_stop").text
    assert "Aborting" in notebook.run("%guava_stop").text
    shown.value.wait()
    assert notebook.run("%guava_stop").lines[0] == "Nothing is running here."


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("--model Net --loss L --data laoder", "did you mean loader?"),
        ("--model Net --loss L --data loader[9]", "IndexError"),
        ("--model Net --data loader", "one of --loss or --step"),
        ("--model Net --loss L --step s --data loader", "only one of --loss or --step"),
        ("--loss L --data loader", "--model"),
        ("--model Net --loss L --data loader --epoch 3", "did you mean --epochs?"),
        ("--model Net --loss L --data loader --epochs 3 --epochs 4", "--epochs is given twice"),
        ("--model Net --loss L --data loader --epochs three", "'three' is not a whole number"),
        ("--model Net --loss L --data loader --epochs 0", "0 is not 1 or more"),
        ("--model Net --loss L --data loader --precision bf61", "did you mean bf16?"),
        ("--model Net --loss L --data loader --lr 1 --optimizer-args {'lr':2}", "both set lr"),
        ("--model Net --loss L --data loader --model-args [1]", "does not map names to values"),
        ("--model Net --loss L --data loader --model-args {width", "never closes"),
        ("--model Net --loss L --data {laoder}", "did you mean loader?"),
        ("--model Net --loss L --data loader --val-interval 3", "--val-interval needs --val"),
        ("--model Net --loss L --data loader --out 3x", "cannot be called so"),
        ("--model Net --loss L --data loader -o class", "cannot be called so"),
        ("--model Net --loss L --data loader extra", "one word too many"),
        ("--model Net --loss L --data loader --shares 0,0", "not a list of weights"),
        ("--model Net --loss L --data loader --fresh --resume a.pt", "contradict"),
        ("--model Net --loss L --data loader --lr nan", "not a finite number"),
        ("--model Net --loss L --data loader --budget 900", "'900' has no unit: write 900MB"),
        ("--model Net --loss L --data loader --budget 900Mbit", "'Mbit' is no unit of bytes"),
        ("--model Net --loss L --data loader --save x.pt", "--save needs --budget"),
        ("--model Net --loss L --data loader --batch-size 32", "--batch-size is an option of the DataLoader"),
        ("--model Net --loss L --data loader --mode pipeline", "%guava_mode pipeline chooses one"),
        ("--model Net --loss L --data loader --tp 2", "--tp is an option of %guava_mode"),
        ("--model Net --loss L --data loader --amp", "--precision bf16 does it"),
    ],
)
def test_each_mistake_is_one_line_and_starts_nothing(notebook: Any, rest: str, said: str) -> None:
    notebook.run("%guava_up --local 1\nloader = [1]")
    shown = notebook.run(f"%guava_train {rest}")
    assert not shown.ok
    assert len(shown.lines) == 1, shown.text
    assert said in shown.text
    assert notebook.orchestrator.run is None


def test_a_dry_run_shows_the_forecast_and_starts_nothing(notebook: Any) -> None:
    notebook.run("%guava_up --local 1\nloader = [1]")
    before = list(notebook.orchestrator.calls)
    shown = notebook.run(TRAIN + " --model-args {'width':3} --dry-run --budget 2MB -o made")
    assert shown.ok and shown.value.budget_bytes == 2_000_000 and notebook.orchestrator.run is None
    assert shown.text.count("would stop after about") == 1  # its table stands there once
    assert notebook.shell.user_ns["made"].run_bytes == 4_000_000
    assert shown.lines[0] == "forecast: data mode, 2 workers, 10 steps in 1 epoch, 4.0 MB in all"
    assert "would stop after about 50%" in shown.text and "sample" in shown.text
    ((name, options),) = notebook.orchestrator.calls[len(before) :]
    assert name == "forecast" and options["model"] == "Net" and options["model_args"] == {"width": 3}
    assert options["train_loader"] == [1] and options["budget_bytes"] == 2_000_000


def test_a_budget_goes_on_in_bytes_with_the_place_of_its_checkpoint(notebook: Any) -> None:
    notebook.run("%guava_up --local 1\nloader = [1]")
    notebook.run(TRAIN + " --budget 1.5GiB --save ~/run.pt --detach")
    (options,) = [given for name, given in notebook.orchestrator.calls if name == "train"]
    assert options["budget_bytes"] == 3 << 29 and options["save_path"] == Path("~/run.pt").expanduser()


def test_magics_that_need_a_session_say_so(notebook: Any) -> None:
    notebook.run("loader = [1]")
    for line in (
        TRAIN,
        "%guava_validate --data loader",
        "%guava_predict --data loader",
        "%guava_save x.pt",
        "%guava_resume x.pt",
        "%guava_log",
    ):
        shown = notebook.run(line)
        assert not shown.ok
        assert "run %guava_up first" in shown.lines[0]


def test_validate_save_resume(notebook: Any, tmp_path: Path) -> None:
    notebook.run(f"%guava_up\nloader = [1, 2]\nfolder = {str(tmp_path)!r}")
    shown = notebook.run("%guava_validate --data loader")
    assert shown.value == {"loss": 0.25, "accuracy": 0.75, "samples": 2}
    assert "validated" in shown.text and "loss 0.25, accuracy 0.75" in shown.text
    shown = notebook.run("%guava_save {folder}/a.pt")
    assert "Saved 1.5 kB" in shown.text
    assert "weights_only=True)['model']" in shown.text
    shown = notebook.run("%guava_save {folder}/none/a.pt")
    assert not shown.ok and "there is no folder" in shown.lines[0] and not (tmp_path / "none").exists()
    shown = notebook.run(f'%guava_resume "{tmp_path}/with blank.pt"')
    assert "step 46, whole epochs done: 2." in shown.text
    assert "--epochs counts from the very beginning, so give more than 2" in shown.text
    assert notebook.orchestrator.calls[1:] == [("load", tmp_path / "with blank.pt")]


@pytest.mark.parametrize(
    ("line", "called"), [("validate --data d", "validate"), ("predict --data d", "predict"), ("resume a.pt", "load")]
)
def test_a_model_may_be_named_where_none_was_trained_here(notebook: Any, line: str, called: str) -> None:
    notebook.run("%guava_up\nd = [1, 2]\nclass Here: pass\nHere.__module__ = '__main__'")
    notebook.run("%%guava_share\nclass Net: pass")
    notebook.run(f"%guava_{line} --model Net --model-args '{{\"width\": 3}}'")
    assert notebook.orchestrator.calls[0] == ("model", ("Net", {"width": 3}))
    assert notebook.orchestrator.calls[1][0] == called
    for words, said in (("--model-args '{}'", "--model-args needs --model"), ("--model Here", "in no shared cell")):
        shown = notebook.run(f"%guava_{line} {words}")
        assert not shown.ok and len(shown.lines) == 1 and said in shown.text
    assert len(notebook.orchestrator.calls) == 2


def test_validate_takes_metrics_by_name_and_by_expression(notebook: Any) -> None:
    notebook.run("%guava_up\nloader = [1, 2]\ndef mine(outputs, targets): return 1")
    mine = notebook.shell.user_ns["mine"]
    for words, metrics in (
        ("--metrics mine,theirs", {"mine": mine, "theirs": "theirs"}),
        ("--metrics torchmetrics:Accuracy", {"Accuracy": "torchmetrics:Accuracy"}),
        ('--metrics "[mine, (mine, dict(k=1))]"', [mine, (mine, {"k": 1})]),
    ):
        assert notebook.run(f"%guava_validate --data loader {words} --loss MSELoss").ok
        assert notebook.orchestrator.calls[-1] == (
            "validate", {"loader": [1, 2], "metrics": metrics, "criterion": "MSELoss"}
        )  # fmt: skip
    shown = notebook.run("%guava_validate --data loader --metrics [nothing]")
    assert not shown.ok and "--metrics [nothing]: NameError" in shown.lines[0]
    shown = notebook.run("%guava_train --model Net --loss L --data loader --metrics mine")
    assert not shown.ok and "--metrics needs --val" in shown.lines[0]


def test_predict_shows_progress_and_a_table_and_keeps_the_results(notebook: Any, tmp_path: Path) -> None:
    notebook.run("%guava_up\nloader = [1, 2, 3]")
    found = Predictions(
        {
            "predictions": np.array([[3, 1], [-1, -1], [0, 2]]),
            "confidences": np.array([[0.9, 0.05], [np.nan, np.nan], [0.8, 0.1]], np.float32),
            "kept": np.array([True, False, True]),
            "sample_ids": np.arange(3),
        },
        120,
    )
    notebook.orchestrator.results = found
    line = f"%guava_predict --data loader --top-k 2 --threshold 0.5 --path {tmp_path} --resume --into results"
    shown = notebook.run(line)
    assert shown.value is found and notebook.shell.user_ns["results"] is found
    assert notebook.orchestrator.calls == [
        ("predict", {"loader": [1, 2, 3], "top_k": 2, "confidence_threshold": 0.5, "path": str(tmp_path), "resume": True})
    ]  # fmt: skip
    assert "predicting: 1 of 3 samples" in shown.text and "predicted: 3 samples" in shown.text
    formats, _ = notebook.shell.display_formatter.format(found)
    for form in ("text/plain", "text/html"):
        for words in ("3 samples", "2 of 3 reach the threshold", "0.9000, 0.0500", "-, -", "120 B"):
            assert words in formats[form].replace("\N{NO-BREAK SPACE}", " "), (form, formats[form])
    notebook.run("%guava_predict --data loader --full --raw --step f")
    assert notebook.orchestrator.calls[-1][1] == {
        "loader": [1, 2, 3], "return_full_probabilities": True, "raw": True, "predict_step": "f",
    }  # fmt: skip
    for words, said in (
        ("--resume", "needs --path"),
        ("--into 3x", "cannot be called so"),
        ("--top-k 0", "not 1 or more"),
    ):
        shown = notebook.run(f"%guava_predict --data loader {words}")
        assert not shown.ok and len(shown.lines) == 1 and said in shown.text


def test_mode(notebook: Any) -> None:
    assert "Mode data" in notebook.run("%guava_mode data").text
    assert "Mode data" in notebook.run("%guava_mode").text
    assert "Mode pipeline; %guava_up opens" in notebook.run("%guava_mode pipeline --micro-batches 8").text
    assert "did you mean pipeline?" in notebook.run("%guava_mode pipelin").text


def test_a_mode_is_said_with_its_numbers_and_reaches_the_orchestrator(notebook: Any) -> None:
    notebook.run("%guava_mode zero --zero 3")
    notebook.run("%guava_up --local 4")
    assert (
        "4 workers, each with its part of every batch; optimizer state, gradients and parameters"
        in notebook.run("%guava_mode").text
    )
    shown = notebook.run("%guava_mode pipeline --micro-batches 8 --schedule gpipe")
    assert "cut into 4 stages on 4 workers, each batch into 8 micro-batches" in shown.text and "gpipe" in shown.text
    assert "into 1 micro-batch that flows" in notebook.run("%guava_mode pipeline --micro-batches 1").text
    assert "dp 2 x pp 2 x tp 1" in notebook.run("%guava_mode hybrid --dp 2 --pp 2").text
    assert "dp 3 x pp 1 x tp 1 needs 3 workers, 4 are here" in notebook.run("%guava_mode hybrid --dp 3").text
    notebook.run('%guava_mode tensor --plan {"head":"colwise"}')
    mode, settings = [what for name, what in notebook.orchestrator.calls if name == "mode"][-1]
    assert (mode, settings["tensor_plan"]) == ("tensor", {"head": "colwise"})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--dp 2", "--dp needs the mode before it"),
        ("tensor --micro-batches 2", "--micro-batches means nothing in tensor mode"),
        ("zero --plan {}", "--plan means nothing in zero mode"),
        ("pipeline --tp 2", "pipeline mode has no axis tp"),
        ("data --zero 1", "data mode has no ZeRO stage"),
        ("zero --zero 0", "zero mode needs stage 1, 2 or 3"),
        ("pipeline --schedule 1fb", "did you mean 1f1b?"),
        ("pipeline --stages-per-worker 2", "stages_per_worker is 2 (--stages-per-worker) with schedule '1f1b'"),
        ("hybrid --dp 2 --pp 2 --zero 3", "with stages use zero_stage=1 (--zero 1)"),
        ("hybrid --dp 2 --pp 2 --sync-batchnorm on", "leave it off (--sync-batchnorm off)"),
        ('tensor --plan {"head":"colwis"}', "is unknown; choose one of colwise"),
        ("tensor --plan head", """is not a JSON object such as {"*.up": "colwise", "*.down": "rowwise"}"""),
        ("hybrid", "hybrid mode needs its axes: how many replicas (dp, --dp)"),
        ("hybrid --zero 1", "such as %guava_mode hybrid --dp 2 --pp 2"),
        ("zero --zero 4", "'4' is no ZeRO stage: zero mode takes 1, 2 or 3, hybrid mode 0, 1, 2 or 3"),
    ],
)
def test_a_mode_that_makes_no_sense_is_one_line_and_changes_nothing(notebook: Any, line: str, told: str) -> None:
    notebook.run("%guava_mode tensor\n%guava_up --local 2")
    before = notebook.run("%guava_mode").text
    shown = notebook.run(f"%guava_mode {line}")
    assert not shown.ok and len(shown.lines) == 1
    assert told in shown.text
    assert notebook.run("%guava_mode").text == before


def test_a_mode_that_does_not_fit_the_workers_says_what_to_do(notebook: Any) -> None:
    notebook.run("%guava_up --workers 3")
    notebook.orchestrator.here = ["colab"]
    notebook.run("%guava_up --local 1")
    shown = notebook.run("%guava_mode hybrid --dp 2 --pp 2")
    assert shown.text.strip() == (
        "Mode hybrid waits for more workers: dp 2 x pp 2 x tp 1 needs 4 workers, 2 are here. Start 2 more: %guava_up "
        "--local 3, or %guava_worker elsewhere; the mode is kept until then."
    )
    notebook.run("%guava_up --local 3")
    assert "Mode hybrid: dp 2 x pp 2 x tp 1" in notebook.run("%guava_mode").text
    shown = notebook.run("%guava_mode pipeline --pp 3")
    assert "4 are here: choose axes that make 4, such as dp 1 x pp 4 x tp 1" in shown.text
    assert "let 1 worker leave" in shown.text


@pytest.mark.parametrize(("axes", "mode"), [("--pp 2", "pipeline"), ("--tp 2", "tensor"), ("--dp 2", "data")])
def test_hybrid_that_amounts_to_another_mode_says_so(notebook: Any, axes: str, mode: str) -> None:
    notebook.run("%guava_up --local 2")
    told = f"Hybrid with these axes on 2 workers amounts to {mode} mode (%guava_mode {mode})"
    assert told in notebook.run(f"%guava_mode hybrid {axes}").text
    notebook.run("%guava_up --local 4")
    assert ("amounts to" in notebook.run("%guava_mode").text) is False


def test_interleaved_with_one_stage_per_worker_gets_a_hint(notebook: Any) -> None:
    notebook.run("%guava_up --local 2")
    hint = "with one stage per worker that is 1f1b, --stages-per-worker 2 interleaves"
    assert hint in notebook.run("%guava_mode pipeline --schedule interleaved").text
    assert hint not in notebook.run("%guava_mode pipeline --schedule interleaved --stages-per-worker 2").text


def test_log(notebook: Any) -> None:
    notebook.run("%guava_up --local 2")
    assert "No worker has printed" in notebook.run("%guava_log").text
    notebook.orchestrator.printed = {f"worker-{rank}": [f"line {n}" for n in range(100)] for rank in (0, 1)}
    assert len(notebook.run("%guava_log").lines) == 100
    assert notebook.run("%guava_log worker-1 -n 2").lines == ["line 98", "line 99"]
    shown = notebook.run("%guava_log worker-l")
    assert len(shown.lines) == 1
    assert "did you mean worker-" in shown.text


def test_energy(notebook: Any) -> None:
    assert "run %guava_up first" in notebook.run("%guava_energy").text
    notebook.run("%guava_up --local 2\nloader = []")
    assert "no run was started" in notebook.run("%guava_energy").text
    assert "-5MB begins with a minus" in notebook.run(f"{TRAIN} --budget -5MB").text
    assert "--flops is an option of %guava_train" in notebook.run("%guava_energy --flops").text
    notebook.run(TRAIN)
    shown = notebook.run("%guava_energy --grams-per-kwh 360")
    assert "2 kJ" in shown.text and "0.2 g" in shown.text and "w2: no sensor" in shown.text


def test_down_twice(notebook: Any) -> None:
    notebook.run("%guava_up")
    assert "Closed" in notebook.run("%guava_down").text
    assert notebook.orchestrator.state == "closed"
    assert "Nothing was open" in notebook.run("%guava_down").text
    assert "Nothing here yet" in notebook.run("%guava_status").text


# ---------------------------------------------------------------------------------------------------------- worker


def test_worker_says_what_it_grants_before_it_joins_then_blocks(notebook: Any) -> None:
    shown = notebook.run(f"%guava_worker {SECRET_CODE} --device cpu --name gpu-box")
    assert shown.ok
    assert notebook.workers[0].code == SECRET_CODE
    assert (notebook.workers[0].device, notebook.workers[0].name) == ("cpu", "gpu-box")
    assert not notebook.workers[0].alive
    assert shown.text.index("Joining lets the orchestrator run") < shown.text.index("worker gpu-box")
    assert shown.text.count("hello") <= 1


def test_worker_code_may_come_from_a_variable_or_the_environment(
    notebook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.run(f"code = {SECRET_CODE!r}")
    notebook.run("%guava_worker {code}")
    monkeypatch.setenv("GUAVA_JOIN_CODE", SECRET_CODE)
    notebook.run("%guava_worker")
    assert [worker.code for worker in notebook.workers] == [SECRET_CODE] * 2


@pytest.mark.parametrize(
    "pasted",
    [
        ">>> {code}",
        '"{code}"',
        "'{code}",
        "In [3]: %guava_worker {code}",
        "%guava_worker {code} # from the laptop",
        "{start} {end}",
        "{start} -{end}",
        "--name gpu-box {code} --device cpu",
    ],
)
def test_worker_code_may_be_pasted_with_what_stood_around_it(notebook: Any, pasted: str) -> None:
    text = pasted.format(code=SECRET_CODE, start=SECRET_CODE[:20], end=SECRET_CODE[20:])
    shown = notebook.run(f"%guava_worker {text}")
    assert SECRET_CODE[20:40] not in shown.text
    if "-{end}" in pasted:  # one character too many: refused, and no piece of it is taken for an option and shown
        assert shown.lines[0].startswith("JoinCodeError: the join code is damaged")
    else:
        assert [worker.code for worker in notebook.workers] == [SECRET_CODE]
        assert notebook.workers[0].name == ("gpu-box" if "gpu-box" in pasted else None)


def test_a_damaged_code_is_one_line(notebook: Any) -> None:
    for code in (SECRET_CODE[:-8], "hello", SECRET_CODE.replace("guava1", "guava2")):
        shown = notebook.run(f"%guava_worker {code}")
        assert len(shown.lines) == 1, shown.text
        assert not notebook.workers


def test_worker_twice_keeps_the_living_one(notebook: Any) -> None:
    notebook.worker_options = {"num_waits": 100}
    notebook.run(f"%guava_worker {SECRET_CODE} --detach")
    shown = notebook.run(f"%guava_worker {SECRET_CODE} --detach")
    assert "already" in shown.text
    assert len(notebook.workers) == 1
    refused = notebook.run(f"%guava_worker {JoinCode.new('127.0.0.1', 4242).encode()} --detach")
    assert "another session" in refused.lines[-1]
    assert "working" in notebook.run("%guava_status").text
    assert notebook.run("%guava_log").lines == ["hello"]
    assert "leaves after its step" in notebook.run("%guava_stop").text


def test_worker_interrupts(notebook: Any) -> None:
    notebook.worker_options = {"num_waits": 100, "interrupt_at": (1,)}
    shown = notebook.run(f"%guava_worker {SECRET_CODE}")
    assert shown.ok
    assert notebook.workers[-1].calls == ["leave"]
    notebook.worker_options = {"num_waits": 100, "interrupt_at": (1, 2), "stubborn": True}
    shown = notebook.run(f"%guava_worker {SECRET_CODE}")
    assert shown.ok
    assert notebook.workers[-1].calls == ["leave", "kill"]
    assert "Traceback" not in shown.text


def test_a_worker_that_crashed_shows_its_last_lines_and_fails_the_cell(notebook: Any) -> None:
    notebook.worker_options = {"last_state": "crashed"}
    shown = notebook.run(f"%guava_worker {SECRET_CODE}")
    assert not shown.ok
    assert shown.lines[-1] == (
        "ClusterError: worker worker-0 crashed: exit status -9. To join again, run this cell again"
    )
    assert shown.text.count("exit status -9") == 1
    assert "hello" in shown.text


def test_in_colab_the_rule_is_told_before_joining(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(magics, "detect_host", lambda shell: Host.COLAB)
    shown = notebook.run(f"%guava_worker {SECRET_CODE}")
    assert "compute units" in shown.text.split("worker worker-0")[0]


def test_closing_lets_the_worker_leave_and_kills_one_that_does_not(notebook: Any) -> None:
    notebook.worker_options = {"num_waits": 100}
    notebook.run(f"%guava_worker {SECRET_CODE} --detach")
    notebook.run("%guava_down")
    assert notebook.workers[-1].calls == ["leave"]
    notebook.worker_options = {"num_waits": 100, "stubborn": True}
    notebook.run(f"%guava_worker {SECRET_CODE} --detach")
    notebook.run("%guava_down")
    assert notebook.workers[-1].calls == ["leave", "kill"]


# --------------------------------------------------------------------------------------------- secrets and loading


def test_the_code_is_nowhere_but_in_the_output_of_up(notebook: Any) -> None:
    notebook.run("%guava_up --workers 1\nloader = []")
    notebook.orchestrator.here = ["worker-0"]
    notebook.orchestrator.printed["worker-0"] = [f"someone printed {SECRET_CODE}"]
    texts = [notebook.run(line).text for line in ("%guava_status", "%guava_log", TRAIN, f"%guava_stop {SECRET_CODE}")]
    texts += [
        notebook.run(line).text for line in (f"%guava_worker {SECRET_CODE} --nam x", f"%guava_worker {SECRET_CODE}")
    ]
    assert all(SECRET_CODE not in text for text in texts)
    assert SECRET_CODE not in repr(notebook.shell.user_ns.get("Out"))


def test_unload_closes_everything_and_takes_the_magics_away(notebook: Any) -> None:
    notebook.run("%guava_up")
    load(notebook.shell)
    assert notebook.shell.magics_manager.registry["GuavaMagics"] is notebook.magics
    unload(notebook.shell)
    unload(notebook.shell)
    assert notebook.orchestrator.state == "closed"
    assert "not found" in notebook.run("%guava_status").text
    load(notebook.shell)
    assert "Nothing here yet" in notebook.run("%guava_status").text


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("%guava_train --prec", ["--precision"]),
        ("r = %guava_train --prec", ["--precision"]),
        ("%guava_train --precision b", ["bf16"]),
        ("%guava_train --data load", ["loader", "loaders"]),
        ("%guava_train --model ", ["Net", "count"]),
        ("%guava_train --tokens c", ["count"]),
        ("%guava_train --loss Cross", ["CrossEntropyLoss"]),
        ("%guava_mode p", ["pipeline"]),
        ("%guava_mode pipeline --sched", ["--schedule"]),
        ("%guava_up --", [flag for flag in commands.UP.flags() if flag != "-h"]),
        ("%%guava_share --n", ["--name"]),
        ("%guava_worker x --device cu", ["cuda", "cuda:0"]),
        ("%guava_log worker-", ["worker-0", "worker-1"]),
        ("%guava_resume ", ["a.pt", "folder/", "--model", "--model-args", "-h", "--help"]),
        ("%guava_train --resume folder/", ["folder/b.pt"]),
    ],
)
def test_tab_completes_options_and_values_and_nothing_else(
    notebook: Any, line: str, offered: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("a.pt", "folder/b.pt", ".hidden"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    notebook.run("%%guava_share --name all\nclass Net: pass\ndef count(batch): return 1")
    notebook.run("loader, loaders = 1, 2\n%guava_up --local 2")
    assert notebook.complete(line) == offered


def test_an_older_ipython_completes_by_its_hooks(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("IPython.core.completer.completion_matcher")
    unload(notebook.shell)
    load(notebook.shell)
    assert "bf16" in notebook.complete("%guava_train --precision b")
    unload(notebook.shell)
    assert "bf16" not in notebook.complete("%guava_train --precision b")


def test_loaders_come_before_other_variables(notebook: Any) -> None:
    notebook.run("from torch.utils.data import DataLoader\nnumbers, batches = [1, 2], DataLoader([1, 2])")
    assert notebook.complete("%guava_train --data ") == ["batches"]


@pytest.mark.parametrize("name", NAMES)
def test_every_magic_has_an_example_that_it_understands(notebook: Any, name: str) -> None:
    command = next(command for command in commands.COMMANDS if command.name == name)
    sign_and_name, _, rest = command.example.partition(" ")
    assert sign_and_name == f"{command.sign}{name}"
    assert command.parse(rest.replace("guava1:...", SECRET_CODE), {}) is not None
    assert f"example: {command.example}" in notebook.run(line_of(name, "-h")).text


def test_a_cell_magic_explains_itself_alone_in_its_cell(notebook: Any) -> None:
    shown = notebook.run("%%guava_share -h")
    assert shown.ok and shown.text.startswith("usage: %%guava_share")
    nothing = notebook.run("%%guava_share --name x\n\n")
    assert not nothing.ok and len(nothing.lines) == 1 and "has no cell to share" in nothing.text


def test_what_a_magic_returns_is_html_on_a_page_and_one_line_of_text(notebook: Any) -> None:
    from guava_nb.cluster.traffic import Traffic
    from guava_nb.forecast.forecast import Forecast
    from guava_nb.status import Status
    from guava_nb.training.run import Run
    from tests.support.energy import record

    def drawn(thing: object) -> dict[str, str]:
        data, _ = notebook.shell.display_formatter.format(thing)
        return data

    run, status = Run("run-1", "data", 3, 30), Status("open", "127.0.0.1:1", "data", 2)
    for thing, words in ((run, "preparing"), (record(), "per sample"), (status, "127.0.0.1:1")):
        shown = drawn(thing)
        assert words in shown["text/html"] and "<script" not in shown["text/html"], shown
    for thing in (run, record()):
        assert drawn(thing)["text/plain"].count("\n") == 0
    part = Traffic.going("sample", 4_000_000)
    made = Forecast("data", 2, 10, 10, part, part, None, part, (part,), part)
    assert "<table" in drawn(made)["text/html"] and "4.0 MB" in drawn(made)["text/plain"]
    for thing in (made, run):
        notebook.magics.objects.shown(thing)
        again = drawn(thing)  # its table stands in this cell already
        assert "text/html" not in again and again["text/plain"].count("\n") == 0
    notebook.run("1")
    assert "text/html" in drawn(run)


def test_a_class_that_was_not_shared_is_told_so_and_not_taken_for_a_typo(notebook: Any) -> None:
    assert notebook.run("%guava_up").ok
    notebook.run("loader = []")
    notebook.run("class Unshared:\n    pass\nUnshared.__module__ = '__main__'")
    shown = notebook.run("%guava_train --model Unshared --loss CrossEntropyLoss --data loader")
    assert not shown.ok and "it exists in this notebook, but in no shared cell" in shown.text


def test_a_shared_cell_says_at_once_what_it_still_lacks(notebook: Any) -> None:
    notebook.run("scale = 2")
    shown = notebook.run("%%guava_share --name half\ndef half(x):\n    return x * scale\n")
    assert "Cell half is shared" in shown.text
    assert "Not all that is shared can be trained yet: name 'scale' is used in cell 'half' (line 2)" in shown.text


# ------------------------------------------------------------------------------------------------------------- doctor


def test_the_doctor_shows_checks_and_the_way_of_a_code_and_never_the_code(
    notebook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from guava_nb.doctor import Check
    from guava_nb.notebook import doctor as doctoring

    asked: list[str] = []

    def check_join(text: str) -> list[Check]:
        asked.append(text)
        return [Check("tcp", "fail", "connection refused", "is the session still open?"), Check("tls", "not tried", "")]

    monkeypatch.setattr(doctoring, "run_checks", lambda: [Check("python", "ok", "3.11")])
    monkeypatch.setattr(doctoring, "check_join", check_join)
    monkeypatch.delenv("GUAVA_JOIN_CODE", raising=False)
    alone = notebook.run("%guava_doctor")
    assert alone.ok and alone.text.startswith("Doctor: 1 ok, 0 to look at, 0 that cannot work") and asked == []
    shown = notebook.run(f"%guava_doctor >>> '{SECRET_CODE}' # pasted")
    assert shown.ok and "1 that cannot work, 1 not tried" in shown.text and "is the session still open?" in shown.text
    assert SECRET_CODE not in shown.text and SECRET_CODE in asked[0]
    assert shown.text.startswith("Doctor: no worker can join from here: tcp fails; ")
    assert shown.text.index("connection refused") < shown.text.index("1 more checks") and "3.11" not in shown.text
    monkeypatch.setattr("getpass.getpass", lambda prompt: SECRET_CODE)
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    assert notebook.run("%guava_doctor --join").ok and asked[1] == SECRET_CODE
    monkeypatch.setattr("getpass.getpass", lambda prompt: "")
    nothing = notebook.run("%guava_doctor --join")
    assert not nothing.ok and "%guava_doctor --join" in nothing.text and "%guava_worker" not in nothing.text
    monkeypatch.setenv("GUAVA_JOIN_CODE", SECRET_CODE)
    assert notebook.run("%guava_doctor").ok and asked[2] == SECRET_CODE
