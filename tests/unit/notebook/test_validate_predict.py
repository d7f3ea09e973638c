"""The lines of %guava_predict --generate: what the session is asked, what is shown as it comes, and mistakes."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def opened(notebook: Any) -> Any:
    notebook.run("%guava_up --workers 1")
    notebook.orchestrator.here += ["local-1"]
    notebook.shell.user_ns.update(prompts=["ab", "c"], rows=[[1, 2]], tok=object())
    return notebook


def test_prompts_are_continued_and_shown_as_they_come(opened: Any) -> None:
    opened.orchestrator.results = " and on"
    line = "%guava_predict --generate --data prompts --tokenizer tok --max-new-tokens 9 --temperature 0.5 --top-k 3 --seed 2"
    shown = opened.run(f"{line} --context 8 --generate-args '{{\"num_beams\": 2}}' --into texts")
    assert shown.ok and shown.value == [" and on"] * 2 == opened.shell.user_ns["texts"]
    assert "0: ab and on" in shown.lines and "1: c and on" in shown.lines
    (name, (prompts, settings)) = opened.orchestrator.calls[-1]
    assert (name, prompts) == ("generate", ["ab", "c"])
    assert settings.pop("tokenizer") is opened.shell.user_ns["tok"]
    assert settings == {
        "max_new_tokens": 9, "temperature": 0.5, "top_k": 3, "seed": 2, "context": 8, "num_beams": 2
    }  # fmt: skip
    opened.orchestrator.results = [3, 4]
    shown = opened.run("%guava_predict --generate --data rows")
    assert "0: [3, 4]" in shown.lines and opened.orchestrator.calls[-1][1] == ([[1, 2]], {})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--data rows --seed 3", "--seed needs --generate"),
        ("--data rows --tokenizer tok", "--tokenizer needs --generate"),
        ("--generate --data rows --raw", "--raw has no meaning with --generate"),
        ("--generate --data rows --max-new-tokens 0", "not 1 or more"),
        ("--generate --data rowz", "no variable rowz"),
    ],
)
def test_mistakes_are_one_line(opened: Any, line: str, words: str) -> None:
    before = len(opened.orchestrator.calls)
    shown = opened.run(f"%guava_predict {line}")
    assert not shown.ok and words in shown.text and len(shown.lines) == 1, shown.text
    assert len(opened.orchestrator.calls) == before
