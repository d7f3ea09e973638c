"""The lines for code on the workers, through a real shell over a fake session."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def opened(notebook: Any) -> Any:
    notebook.run("%guava_up --workers 2")
    notebook.orchestrator.here += ["local-1", "local-2"]
    return notebook


def test_a_cell_shows_lines_by_worker_and_gives_values(opened: Any) -> None:
    opened.orchestrator.results = 5
    shown = opened.run("%%guava_px\nx = 1\nx")
    assert shown.ok and shown.value == {"local-1": 5, "local-2": 5}
    assert "local-1 | printed there" in shown.lines and "local-2 | printed there" in shown.lines
    (name, (text, on, cell)) = opened.orchestrator.calls[-1]
    assert (name, text.strip(), on) == ("run_code", "x = 1\nx", None) and cell.startswith("px ")
    assert opened.run("%%guava_px --on local-2\nx").value == 5
    assert opened.run("%%guava_px --rank 0 -o mine\nx").value is None
    assert opened.shell.user_ns["mine"] == 5 and opened.orchestrator.calls[-1][1][1] == ["local-1"]
    opened.orchestrator.results = None
    assert opened.run("%%guava_px\nx = 1").value is None


def shown_value(opened: Any, cell: str) -> str:
    """What a page shows of the value of a cell, which is formatted while the cell still runs."""
    texts: list[str] = []
    hook = opened.shell.displayhook
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook, "write_format_data", lambda data, metadata=None: texts.append(data["text/plain"]))
        assert opened.run(cell).ok
    return texts[-1] if texts else ""


def test_a_long_value_is_cut_in_the_cell_and_whole_in_out(opened: Any) -> None:
    opened.orchestrator.results = "x" * 1_000_000
    shown = shown_value(opened, "%%guava_px --on local-1\nx")
    number = opened.shell.displayhook.prompt_count
    assert shown.startswith("'xxx") and len(shown) < 20_200
    assert shown.endswith(f"[cut here after 20000 characters; Out[{number}] has the whole value]")
    assert opened.shell.user_ns["_"] is opened.orchestrator.results
    assert len(shown_value(opened, "_")) == 1_000_002  # asked for here, it is the user's own
    both = shown_value(opened, "%%guava_px\nx")
    assert both.startswith("{'local-1': 'xxx") and "has the whole value]" in both and len(both) < 20_200
    opened.orchestrator.results = [1, 2]
    assert shown_value(opened, "%%guava_px --on local-1\nx") == "[1, 2]"


def test_a_flood_of_lines_is_shown_in_part_and_ends_with_its_last_lines(opened: Any) -> None:
    opened.orchestrator.printed = {"local-1": [f"line {k}" for k in range(5000)], "local-2": ["y" * 3000] * 90}
    lines = opened.run("%%guava_px --on local-1\nx").lines
    assert lines[:2] == ["local-1 | line 0", "local-1 | line 1"] and "local-1 | line 4999" in lines
    assert (
        "[this cell shows no more lines as they come; %guava_log shows the newest, and /tmp/lines has the rest]"
        in lines
    )
    assert [line for line in lines if line.startswith("[3990 lines left out here;")] and len(lines) < 1020
    long = opened.run("%%guava_px --on local-2\nx").text
    assert len(long) < 250_000 and "lines left out here" in long


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%guava_px", "two percent signs"),
        ("%%guava_px --rank 5\nx", "there are: 0 (local-1), 1 (local-2)"),
        ("%%guava_px --rank 0 --on local-1\nx", "give one of them"),
        ("%%guava_px -o 3x\nx", "3x"),
        ("%guava_push imagse", "no variable imagse; did you mean images?"),
        ("%guava_pull 3x", "3x"),
        ("%guava_push", "NAME"),
        ("%guava_pip --upgrade torch", "no option --upgrade"),
        ("%guava_run", "runs a file: %guava_run train.py"),
        ("%guava_run not_there.py --lr 3", "not_there.py: there is no such file here"),
        ("%%guava_run --path sideways\n1", "not one of auto, relay, direct"),
        ("%%guava_run --on local-1 --epochs 3\n1", "--epochs is an option of %guava_train"),
    ],
)
def test_mistakes_are_one_line(opened: Any, cell: str, words: str) -> None:
    opened.shell.user_ns["images"] = [1]
    before = len(opened.orchestrator.calls)
    shown = opened.run(cell)
    assert not shown.ok and len(shown.lines) == 1 and words in shown.text, shown.text
    assert len(opened.orchestrator.calls) == before


def test_a_program_runs_from_a_cell_or_a_file_with_arguments_of_its_own(opened: Any, tmp_path: Any) -> None:
    shown = opened.run("%%guava_run --on local-1,local-2 --path relay -- --epochs 3\nimport torch\n")
    (name, (text, arguments, settings)) = opened.orchestrator.calls[-1]
    assert shown.ok and (name, text.strip(), arguments) == ("run_program", "import torch", ("--epochs", "3"))
    assert settings["name"].startswith("run ") and (settings["on"], settings["path"]) == (
        ["local-1", "local-2"],
        "relay",
    )
    assert "local-1 | rank 0 printed" in shown.lines and "local-2 | rank 1 printed" in shown.lines
    assert any(line.startswith("ended: run ") for line in shown.lines)
    file = tmp_path / "train.py"
    file.write_text("1 + 1\n")
    assert opened.run(f"%guava_run {file} --lr 0.1 -h").ok
    (_, (text, arguments, settings)) = opened.orchestrator.calls[-1]
    assert (text, arguments, settings["name"], settings["path"]) == (
        "1 + 1\n",
        ("--lr", "0.1", "-h"),
        "train.py",
        "auto",
    )


def test_without_a_session_each_says_what_to_do(notebook: Any) -> None:
    notebook.shell.user_ns["x"] = 1
    for cell in (
        "%%guava_px\n1",
        "%guava_push x",
        "%guava_pull x",
        "%guava_pip einops",
        "%guava_files a.py",
        "%%guava_run\n1",
    ):
        shown = notebook.run(cell)
        assert not shown.ok and "run %guava_up first" in shown.text and len(shown.lines) == 1


def test_push_pull_pip_and_files_say_where_things_are(opened: Any) -> None:
    opened.shell.user_ns["x"] = [1, 2]
    shown = opened.run("%guava_push x")
    assert "x is on local-1, local-2. A worker that joins later has to be given them too." in shown.text
    assert opened.orchestrator.calls[-1] == ("push", ({"x": [1, 2]}, None))
    assert "x, y are here, a dict by worker, from local-1, local-2." in opened.run("%guava_pull x,y").text
    assert opened.shell.user_ns["y"] == {"local-1": "y of local-1", "local-2": "y of local-2"}
    opened.run("%guava_pull y --rank 1")
    assert opened.shell.user_ns["y"] == "y of local-2"
    assert opened.run("%guava_pip 'einops>=0.8'").text.count("installed einops 0.8.") == 2
    assert opened.orchestrator.calls[-1] == ("install", (("einops>=0.8",), None))
    assert "later gets them too" in opened.run("%guava_files a.py b").text
    assert "later gets them too" not in opened.run("%guava_files a.py --on local-1").text


def test_tab_knows_variables_and_workers(opened: Any) -> None:
    opened.shell.user_ns["my_images"] = 1
    assert "my_images" in opened.complete("%guava_push my_i")
    assert opened.complete("%guava_pull x --on local-") == ["local-1", "local-2"]
    assert "--rank" in opened.complete("%guava_px --r")
