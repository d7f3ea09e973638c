"""The pages for readers: README stays short and names what the code has; links and paths of all pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from guava_nb.config import MODES
from guava_nb.outer_methods import outer_methods
from guava_nb.spec.training_options import option_infos
from guava_nb.tunnels import tunnel_names
from guava_nb.wire_formats import error_feedback, message_sum, registry, top_k
from tests.support.readme_tables import README, with_table
from tests.unit.test_house_docstrings import attributes, bases

ROOT = README.parent
PACKAGE = ROOT / "guava_nb"
#: Every page that a reader may be led to.
PAGES = sorted(
    path for folder in ("guava_nb", "notebooks", "tests") for path in (ROOT / folder).rglob("*.md")
) + sorted(ROOT.glob("*.md"))  # fmt: skip
README_LINES = 250
CALL = re.compile(r"\.(\w+)\(")
#: About a page and a half. Longer are the wire's specification, whose tables tests compare, and a room with tables of states.
ROOM_LINES, LONGER = 100, {"protocol"}


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def section(title: str) -> str:
    return text_of(README).partition(f"## {title}\n")[2].partition("\n## ")[0]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= README_LINES


def test_the_readme_of_a_room_is_a_page_and_a_half() -> None:
    lines = {page.parent.name: len(text_of(page).splitlines()) for page in PACKAGE.glob("*/README.md")}
    assert {room: count for room, count in lines.items() if count > ROOM_LINES and room not in LONGER} == {}


def test_the_table_of_magics_is_that_of_the_code() -> None:
    assert text_of(README) == with_table(text_of(README)), "run python -m tests.support.readme_tables"


def test_the_tables_of_tunnels_and_modes_leave_none_out() -> None:
    tunnels = {word.split(":")[0] for word in re.findall(r"^\| `([^`-][^`]*)`", section("Which tunnel"), re.M)}
    assert tunnels == set(tunnel_names())
    modes = section("Which mode, which sync")
    assert [mode for mode in MODES if f"%guava_mode {mode}" not in modes] == []
    choices = {one.name: one.choices for one in option_infos()}
    assert [word for word in choices["sync"] if word not in modes] == []
    assert [
        word for word in choices["wire"] if word != "fp32" and f"`{word}`" not in modes and f"wire {word}`" not in modes
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_to_a_page_and_a_heading(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text_of(page)):
        name, _, anchor = link.partition("#")
        there = page if not name else (page.parent / name).resolve()
        if not there.exists() or (anchor and anchor not in anchors(text_of(there))):
            broken.append(link)
    assert broken == []


def test_every_room_and_every_page_can_be_reached_from_the_page_of_the_house() -> None:
    house = text_of(PACKAGE / "README.md")
    rooms = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    assert [room for room in rooms if f"({room}/README.md)" not in house] == []
    assert [
        page.name for page in PACKAGE.glob("*.md") if page.name != "README.md" and f"({page.name})" not in house
    ] == []


def test_the_picture_of_the_rooms_has_the_layers_that_imports_keep() -> None:
    picture = text_of(PACKAGE / "README.md").partition("```text\n")[2].partition("```")[0]
    layers = re.search(r"^layers = \[\n(.*?)^\]", text_of(ROOT / "pyproject.toml"), re.M | re.S)
    assert layers is not None
    drawn = [match[0] for match in re.findall(r"^  (\w+( \| \w+)*)(?=  |$)", picture, re.M)]
    assert drawn == re.findall(r'"(.+)"', layers[1])


def test_the_glossary_is_short_and_explains_each_term_once() -> None:
    glossary = text_of(PACKAGE / "README.md").partition("## Glossary")[2].partition("\n## ")[0]
    terms = [term for row in re.findall(r"^\| (.+?) \|", glossary, re.M)[2:] for term in row.split(", ")]
    assert len(re.findall(r"^\| ", glossary, re.M)) - 2 <= 30
    assert len(terms) == len(set(terms))


def has(owner: str, member: str) -> bool:
    """Whether a class of ours, or one that it derives from, has such a member; classes of others have all."""
    if owner not in attributes():
        return True
    return member in attributes()[owner] or any(
        base in attributes() and has(base, member) for base in bases().get(owner, ())
    )


def test_members_of_our_classes_that_a_page_names_exist() -> None:
    """The pages of the house are held more closely, in `test_house.py`: there each class must be ours."""
    found: list[str] = []
    for page in PACKAGE.rglob("*.md"):
        members = set(re.findall(r"`([A-Z]\w+)\.([a-z_]\w*)(?:\(.*?\))?`", text_of(page)))
        found += [f"{page.parent.name}: {owner}.{member}" for owner, member in members if not has(owner, member)]
    assert found == []


def test_a_member_that_was_renamed_is_found() -> None:
    assert has("StarExchange", "issue") and has("Tensor", "anything")  # `issue` is its base's
    assert not has("StarExchange", "_send_mean")


def example(page: Path) -> str:
    """The Python that stands in a page between its sentences: lines that are indented by four blanks, outside of fences."""
    lines = re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S).splitlines()
    return "\n".join(line[4:] for line in lines if re.match(r"    \w", line))


def test_methods_that_the_example_of_a_room_calls_exist() -> None:
    known = set().union(*attributes().values()) | {"numel"}
    called = {(page.parent.name, name) for page in PACKAGE.glob("*/README.md") for name in CALL.findall(example(page))}
    assert ("wire_formats", "encode") in called and ("split", "setup_model") in called
    assert sorted((room, name) for room, name in called if name not in known) == []


@pytest.mark.parametrize("room", ["wire_formats", "outer_methods"])
def test_the_example_of_a_room_of_pure_functions_runs(room: str) -> None:
    """What it takes for given stands here: tensors of one bucket, a member's part, the first round."""
    flat, before, after = torch.ones(300), torch.ones(8192), torch.linspace(0, 1, 8192)
    names = {**vars(error_feedback), **vars(outer_methods), **vars(registry), **vars(message_sum), **vars(top_k)}
    names |= {"flat": flat, "before": before, "after": after, "part": 1.0, "buffer": None}
    exec(example(PACKAGE / room / "README.md"), names)
    total = names["total"]
    if room == "wire_formats":
        assert torch.allclose(total, flat, atol=0.01)
    else:
        assert total.count_nonzero() == 8192 // 64 and torch.equal(names["weights"], before - total)
