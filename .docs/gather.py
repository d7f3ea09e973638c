"""A hook of mkdocs: the pages are where they belong, beside the code; here they are gathered under the same paths.

Files that they link to come too, so that links mean on the site what they mean in the repository.
"""

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "guava_nb/**/README.md", "tests/README.md", "notebooks/*.ipynb")
_LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)")
_SOURCE = re.compile(r'href="(?![a-z]+:)([^"#]*?)([^"/#]+)\.(?:md|ipynb)(?=["#])')
_REFERENCE = re.compile(r'(?:href|src)="(?![a-z]+:|/)([^"#?]+)')


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and the files that they link to, pages among them."""
    waiting = {path for pattern in PAGES for path in ROOT.glob(pattern)}
    found: set[Path] = set()
    while waiting:
        found.add(page := waiting.pop())
        waiting |= set(_linked(page)) - found if page.suffix == ".md" else set()
    for path in sorted(found):
        name = path.relative_to(ROOT).as_posix()
        if files.get_file_from_path(name) is None:
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def _linked(page: Path) -> list[Path]:
    targets = [(page.parent / link).resolve() for link in _LINK.findall(page.read_text(encoding="utf-8"))]
    return [target for target in targets if target.is_file() and target.is_relative_to(ROOT)]


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Have links of a lesson lead to the site's pages: mkdocs knows those of Markdown only."""
    if not page.file.src_uri.endswith(".ipynb"):
        return output
    return _SOURCE.sub(lambda found: f'href="{found[1]}{"index" if found[2] == "README" else found[2]}.html', output)


def on_post_build(config: Any) -> None:
    """End the build where a link of a finished page, a lesson's too, leads to no file of the site."""
    site = Path(config.site_dir)
    lost = [
        f"{page.relative_to(site)}: {link}"
        for page in site.rglob("*.html")
        for link in _REFERENCE.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / unquote(link)).exists()
    ]
    if lost:
        raise PluginError("links that lead nowhere:\n" + "\n".join(sorted(lost)))
