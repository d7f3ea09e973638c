"""Every notebook of the project runs from top to bottom, and is stored with what it shows and nothing else."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from guava_nb.cli.main import build_parser
from guava_nb.notebook.commands import COMMANDS
from tests.support import lessons
from tests.support.lessons import (
    FOLDER,
    MOST_BYTES,
    NOTEBOOKS,
    PICTURES,
    WORKER,
    figures,
    leaks,
    other_side,
    shown_texts,
)

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
COMMAND_OF = {command.name: command for command in COMMANDS}


def test_there_are_notebooks() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{number:02d}" for number in range(len(NOTEBOOKS))]
    assert len(NOTEBOOKS) >= 13
    assert WORKER in [path.stem for path in NOTEBOOKS]


def notebook_at(path: Path) -> Any:
    import nbformat  # compiles a grammar: seconds that only the process which runs these tests should take

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    """In a process of its own, as a reader would run it; text instead of widgets is the only difference."""
    if path.stem == WORKER:
        with other_side() as code:
            run_notebook(path, tmp_path, GUAVA_JOIN_CODE=code)
    else:
        run_notebook(path, tmp_path)


@pytest.mark.timeout(LIMIT_S + 30)
def test_what_a_session_says_is_what_is_stored(tmp_path: Path) -> None:
    """Word for word: sentences, errors, and the losses that a seed gives."""
    run_notebook(ROOT / "tests" / "notebooks" / "strict" / "session.ipynb", tmp_path, compare="--nbval")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_becomes_a_page(path: Path) -> None:
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter().from_filename(str(path))
    assert notebook_at(path).cells[0].source.splitlines()[0].lstrip("# ") in page


def test_a_lesson_whose_kernel_was_ended_is_not_stored_and_says_by_whom_it_may_be(monkeypatch: Any) -> None:
    """Nbclient ends the kernel where its own process is interrupted, and says "Kernel died" of it."""
    from nbclient.exceptions import DeadKernelError

    class Ended:
        def execute(self, env: dict[str, str]) -> None:
            raise DeadKernelError("Kernel died")

    monkeypatch.setattr(lessons, "_watched_client", lambda notebook: Ended())
    before = NOTEBOOKS[0].read_bytes()
    with pytest.raises(SystemExit, match="is not stored: its kernel ended after .* the end of a `timeout` around it"):
        lessons.store(NOTEBOOKS[0])
    assert NOTEBOOKS[0].read_bytes() == before


def run_notebook(path: Path, tmp_path: Path, compare: str = "--nbval-lax", **more: str) -> None:
    environment = {**os.environ, "GUAVA_UI": "text", "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path), **more}
    environment["PYTHONPATH"] = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    options = [
        compare,
        "--nbval-current-env",
        "--nbval-cell-timeout=120",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:python",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", *options, str(path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    # After a cell that timed out nbval marks the rest as expected failures, which would look green.
    assert not re.search(r"xfailed|skipped", summary), summary


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_with_what_it_shows_and_without_widgets_paths_or_secrets(path: Path) -> None:
    """`python -m tests.support.lessons` stores it so."""
    notebook = notebook_at(path)
    assert "widgets" not in notebook.metadata
    assert notebook.metadata.kernelspec.name == "python3"
    assert path.stat().st_size <= MOST_BYTES
    assert [leak for text in shown_texts(notebook) for leak in leaks(text)] == []
    assert [text for text in shown_texts(notebook) if "Warning: " in text] == [], "a lesson shows what is right"
    for cell in notebook.cells:
        assert not re.search(r"guava1:[A-Za-z0-9_-]{6,}", cell.source)
        if cell.cell_type == "code":
            assert cell.execution_count is not None, f"{cell.id} was not run"
            kinds = [kind for output in cell.outputs for kind in output.get("data", {})]
            assert not any("widget" in kind for kind in kinds)
            if re.search(r"^%guava_(train|worker)", cell.source, re.M) and not cell.source.startswith("%%capture"):
                assert cell.outputs, f"{cell.id} shows nothing"
            failed = [output.get("evalue") for output in cell.outputs if output.output_type == "error"]
            assert bool(failed) == ("raises-exception" in cell.metadata.get("tags", ())), (cell.id, failed)


def test_pictures_of_the_page_about_lessons_are_what_lessons_show() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, (lesson, cell) in PICTURES.items():
        picture = (FOLDER / "pictures" / name).read_bytes()
        assert f"(pictures/{name})" in page
        found = figures(notebook_at(FOLDER / f"{lesson}.ipynb"), cell)
        assert picture[:4] == b"\x89PNG" and (not found or picture == found[-1]), name


def test_a_stored_output_that_tells_of_this_machine_is_found() -> None:
    for text in (
        "saved to /root/x/model.pt",
        "/tmp/tmpab12/run.pt",
        "<b>/home/me/data</b>",
        "guava1:abcdefgh",
        "'/usr/lib/x'",
        "<li>w0 joined: A CPU on lab7</li>",
    ):
        assert leaks(text), text
    for text in (
        "3 MB/s of 1/2",
        "notebooks/pictures/a.png",
        "see https://a.org/tmp/x",
        "guava1:...",
        "</td></tr>",
        "w0 joined: A CPU on this-machine",
    ):
        assert not leaks(text), text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_cells_are_python_and_its_magics_take_their_options(path: Path) -> None:
    """Also where `test_it_runs` runs with --whole only: a magic or an option that was renamed is found at once."""
    cells = [cell.source for cell in notebook_at(path).cells if cell.cell_type == "code"]
    lines = [
        line for cell in cells for line in cell.replace("\\\n", "").splitlines() if re.match(r"\s*%%?guava_", line)
    ]
    assert lines
    for line in lines:
        name, _, options = line.strip().lstrip("%").partition(" ")
        # Variables of the notebook stand for numbers, or for bytes; what takes words takes these too.
        variables = {word: "1MB" if word == "limit" else "1" for word in re.findall(r"[{$](\w+)", options)}
        assert COMMAND_OF[name].parse(options, variables) is not None, line
    for cell in cells:
        compile(TransformerManager().transform_cell(cell), str(path), "exec")


#: Options of other programs that lessons write about.
_OTHERS_OPTIONS = {"--port", "--help"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_magics_commands_and_options_in_its_text_exist(path: Path) -> None:
    texts = [cell.source for cell in notebook_at(path).cells if cell.cell_type == "markdown"]
    assert [problem for text in texts for problem in unknown_words(text)] == []


def test_words_that_do_not_exist_are_found_in_a_text() -> None:
    assert unknown_words("run `%guava_trian --model Net`") and unknown_words("`%guava_up --colour red` opens")
    assert unknown_words("`guava statsu --follow`") and unknown_words("give it `--fastest`")
    assert not unknown_words("`%guava_up --local 2`, `guava worker --listen`, `--shares 3,1`, then guava status")


def unknown_words(text: str) -> list[str]:
    """Magics, commands of `guava` and options in pieces of code of a text that are none."""
    known = {flag for command in COMMANDS for option in command.options for flag in option.flags}
    problems = [name for name in re.findall(r"%guava_(\w+)", text) if f"guava_{name}" not in COMMAND_OF]
    for code in re.findall(r"`([^`\n]+)`", text):
        options = re.findall(r"(?<!\S)--[a-z][\w-]*", code)
        magic, command = re.match(r"%%?(guava_\w+)", code), re.match(r"guava (?!_nb)([a-z]\w*)", code)
        if magic:
            flags = {f for o in getattr(COMMAND_OF.get(magic[1]), "options", ()) for f in o.flags} | {"-h"}
        elif command:
            flags = command_flags(command[1])
            problems += [code] * (not flags)
        else:
            flags = known | _OTHERS_OPTIONS
        problems += [f"{word} in {code}" for word in options if word not in flags]
    return problems


def command_flags(name: str) -> set[str]:
    """Options of a command of `guava`; none where there is no such command."""
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    found = commands.choices.get(name)
    return {flag for action in found._actions for flag in action.option_strings} if found else set()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_teaches_and_cleans_up(path: Path) -> None:
    """A goal, a picture of what goes where, numbers, a prediction before them, an exercise, the way back."""
    cells = notebook_at(path).cells
    text = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert cells[0].cell_type == "markdown" and "**Goal.**" in cells[0].source and "**You need**" in cells[0].source
    assert len(text) >= len(cells) / 3
    (picture,) = [source for source in text if source.startswith("## What goes where\n")]
    assert "\n```\n" in picture  # letters, not SVG: GitHub and Colab take SVG out of a text
    for part in ("The numbers to watch", "**Predict.**", "## Exercise", "machines"):
        assert part in "\n".join(text), part
    exercise = next(number for number, cell in enumerate(cells) if "## Exercise" in cell.source)
    assert exercise < len(cells) - 2, "an exercise without its answer"
    assert any("%guava_down" in cell.source for cell in cells[-3:])
    assert all(WORKER in source for source in text if "**On two machines.**" in source)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_badges_and_links_lead_to_it_and_to_what_is_there(path: Path) -> None:
    cells = notebook_at(path).cells
    assert f"colab.research.google.com/github/guava-nb/guava_nb/blob/main/notebooks/{path.name})" in cells[0].source
    assert f"mybinder.org/v2/gh/guava-nb/guava_nb/main?labpath=notebooks%2F{path.name})" in cells[0].source
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", "\n".join(cell.source for cell in cells))
    assert [link for link in links if not (path.parent / link).exists()] == []
    # Colab has none of us: the first cell that runs installs, and leaves alone what is there.
    first = next(cell.source for cell in cells if cell.cell_type == "code")
    assert "%pip install" in first and 'find_spec("guava_nb") is None' in first
