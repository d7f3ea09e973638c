"""What a student writes on a wrong line, or in the words of another program: one sentence with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from guava_nb.notebook import commands
from guava_nb.notebook.display import show_help


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%guava_up --epochs 3", "%guava_up: --epochs is an option of %guava_train"),
        ("%guava_up --device cuda", "--device is an option of %guava_worker"),
        ("%guava_worker --local 2", "--local is an option of %guava_up"),
        ("%guava_validate --data x --batch-size 3", "--batch-size is an option of the DataLoader"),
        ("%guava_train --model N --loss L --data x --workers 2", "--workers is an option of %guava_up"),
        ("%guava_save --epochs 2", "--epochs is an option of %guava_train"),
        ("%guava_mode ddp", "did you mean data?"),
        ("%guava_mode FSDP", "did you mean zero --zero 3?"),
        ("%guava_mode pp", "did you mean pipeline?"),
        ("%guava_mode Tensor", "did you mean tensor?"),
        (
            "%guava_predict --generate --data 'the quick'",
            "this is no expression of Python; put the value into a variable",
        ),
        ("%guava_train --model N --loss L --data loader --out print", "would hide Python's own print"),
        ("%guava_predict --data loader --into list", "would hide Python's own list"),
        ("%guava_pull len", "would hide Python's own len"),
        ("%guava_push images.shape", "it takes names: value = images.shape, then %guava_push value"),
        ("%guava_export x.py", "no run was started in this session yet: %guava_train starts one"),
        ("%guava_worker guava1:AAAA --device gpu", "join code"),
    ],
)
def test_one_sentence_says_where_it_belongs(notebook: Any, line: str, said: str) -> None:
    notebook.run("%guava_up --local 1\nloader = [1]")
    shown = notebook.run(line)
    assert not shown.ok and len(shown.lines) == 1 and said in shown.text, shown.text


def test_each_option_that_is_on_a_wrong_line_is_told_where_it_is(notebook: Any) -> None:
    homes = {
        flag: f"{one.sign}{one.name}" for one in commands.COMMANDS for entry in one.options for flag in entry.flags
    }
    for flag in sorted(flag for flag in homes if flag.startswith("--")):
        command = next((one for one in commands.COMMANDS if flag not in one.flags() and not one.rest_to), None)
        assert command is not None
        shown = notebook.run(f"%{command.name} {flag}" if command.sign == "%" else f"%%{command.name} {flag}\n1")
        assert not shown.ok and f"{flag} is an option of" in shown.text, shown.text


def test_a_wrong_launcher_opens_no_session(notebook: Any) -> None:
    for words in ("gpu1", "ssh", "ray"):
        shown = notebook.run(f"%guava_up --on {words}")
        assert not shown.ok and "--on" in shown.text, shown.text
    assert not notebook.orchestrators


def test_a_mode_that_was_chosen_before_holds_from_the_opening_on(notebook: Any) -> None:
    notebook.run("%guava_mode pipeline --micro-batches 8")
    notebook.run("%guava_up --local 1")
    assert ("mode", ("pipeline", {"micro_batches": 8})) in notebook.orchestrator.calls


def test_a_mode_that_is_chosen_while_a_run_goes_on_is_told_to_hold_from_the_next_one(notebook: Any) -> None:
    notebook.next_run.num_steps = 10_000
    notebook.run("%guava_up --local 1\nloader = [1]")
    notebook.run("%guava_train --model Net --loss CrossEntropyLoss --data loader --detach")
    shown = notebook.run("%guava_mode zero --zero 1")
    assert shown.ok and "This holds from the next run on; run-1 goes on as it began." in shown.text
    assert "goes on" not in notebook.run("%guava_mode").text


def test_what_ends_early_says_so_where_its_progress_stood(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook.run("%guava_up --local 1\nloader = [1]")
    for raised, title in ((KeyboardInterrupt(), "interrupted"), (ValueError("x"), "not validated")):

        def validate(*_: Any, progress: Any, raised: BaseException = raised, **__: Any) -> Any:
            progress(152, 400)
            raise raised

        monkeypatch.setattr(notebook.orchestrator, "validate", validate)
        shown = notebook.run("%guava_validate --data loader")
        assert not shown.ok and f"{title}: 152 of 400 samples" in shown.text, shown.text


def test_a_page_breaks_the_lines_of_help_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, str]] = []
    monkeypatch.setattr("guava_nb.notebook.display.show_bundle", lambda text, html: shown.append((text, html)))
    for command in commands.COMMANDS:
        show_help(command.help(), command.help(1000), "html")
        text, html = shown[-1]
        assert text == command.help()
        for entry in command.options:
            name = entry.flags[0] if entry.flags[0].startswith("-") else ""
            assert html.count(f"<b><code>{name}") >= 1, (command.name, name)
        assert html.count("<div") == html.count("</div>")
        assert 'nowrap">[' in html or not command.options
