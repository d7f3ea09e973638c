from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError

from guava_nb.notebook.line_words import expand, near, split_line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", []),
        ("  # a comment", []),
        ("a b  c", ["a", "b", "c"]),
        ("a # b", ["a"]),
        ("a#b c", ["a#b", "c"]),
        ("'a b' \"c # d\" ''", ["a b", "c # d", ""]),
        ('--args {"a": [1, 2], "b": "x y"} z', ["--args", '{"a": [1, 2], "b": "x y"}', "z"]),
        ("--data f(x, 'y z')[0] # c", ["--data", "f(x, 'y z')[0]"]),
        (r"C:\data\net.pt", [r"C:\data\net.pt"]),
        ("--lr=1e-3", ["--lr=1e-3"]),
        ("don) t", ["don)", "t"]),
    ],
)
def test_split(line: str, words: list[str]) -> None:
    assert split_line(line) == words


@pytest.mark.parametrize("line", ["'a", 'a "b', "{1", "f(x", "[(1]"])
def test_what_is_never_closed_is_told_without_repeating_the_line(line: str) -> None:
    with pytest.raises(UsageError, match="never closes it") as caught:
        split_line(f"guava1:secretsecret {line}")
    assert "secret" not in str(caught.value)


@given(st.lists(st.text(st.characters(blacklist_characters="\"'"), min_size=1)))
@settings(max_examples=100, deadline=None)
def test_quoted_words_come_back(words: list[str]) -> None:
    assert split_line(" ".join(f'"{word}"' for word in words)) == words


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_line_gives_words_or_one_sentence(line: str) -> None:
    try:
        assert all(isinstance(word, str) for word in split_line(line))
    except UsageError as error:
        assert "\n" not in str(error)


def test_expand() -> None:
    names = {"x": 5, "net": SimpleNamespace(width=8), "table": {"key": 1}, "row": [7]}
    assert expand("$x-{x}-{net.width}-{table[key]}-{row[0]}", names) == "5-5-8-1-7"
    assert expand("held-{x+1}.pt {x + 1:03d} {net.width*2} {row[0] ** 2}", names) == "held-6.pt 006 16 49"
    assert expand('{"a": x} {1, 2} {lr: 0.1} {"p": "{x}"} {a b}', names) == '{"a": x} {1, 2} {lr: 0.1} {"p": "5"} {a b}'
    assert expand("$$x {{x}}", names) == "$x {x}"
    assert expand('{"a": 1, "b": {"c": $x}}', names) == '{"a": 1, "b": {"c": 5}}'
    assert expand("100$ {} { x }", names) == "100$ {} { x }"
    assert expand("{{x}}}", names) == "{x}}"


@pytest.mark.parametrize("text", ["$y", "{net.depth}", "{table[other]}", "{row[9]}", "{x.y.z}"])
def test_expand_never_passes_over_an_unknown_name(text: str) -> None:
    with pytest.raises(UsageError):
        expand(text, {"x": 5, "net": SimpleNamespace(), "table": {}, "row": []})


def test_near() -> None:
    assert near("epoch", ["--epochs", "epochs"]) == "; did you mean epochs?"
    assert near("zzz", ["epochs"]) == ""
