"""The table of all magics in README.md, made from the table that the magics parse their lines by.

python -m tests.support.readme_tables    # writes it into README.md; to be run when a magic came, went or does something else
"""

from __future__ import annotations

from pathlib import Path

from guava_nb.notebook.commands import COMMANDS
from guava_nb.notebook.line_options import Command

__all__ = ["BEGIN", "END", "README", "magics_table", "with_table"]

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- magics -->\n", "<!-- end of magics -->"


def _row(command: Command) -> str:
    """A magic's name, the first sentence of its help, and its example."""
    first = command.summary.split(". ")[0].rstrip(".").replace("|", "\\|")
    example = command.example.replace("%%", "%") if command.sign == "%" else command.example
    shown = f"`{example}`" if example != f"{command.sign}{command.name}" else ""
    return f"| `{command.sign}{command.name}` | {first} | {shown} |\n"


def magics_table() -> str:
    """The table as Markdown, a row for each magic."""
    return "| magic | what it does | for example |\n|---|---|---|\n" + "".join(map(_row, COMMANDS))


def with_table(text: str) -> str:
    """A README with the table between its markers."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{magics_table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
