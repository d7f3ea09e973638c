"""A hook of mkdocs: the pages are where they belong, beside the code; here they are gathered under the same paths.

Files that they link to come too, so that links mean on the site what they mean in the repository.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "guava_nb/**/README.md", "tests/README.md", "notebooks/*.ipynb")
_LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)")


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and the files that they link to."""
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    linked = {target for page in pages if page.suffix == ".md" for target in _linked(page)}
    for path in [*pages, *sorted(linked - set(pages))]:
        name = path.relative_to(ROOT).as_posix()
        if files.get_file_from_path(name) is None:
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def _linked(page: Path) -> list[Path]:
    targets = [(page.parent / link).resolve() for link in _LINK.findall(page.read_text(encoding="utf-8"))]
    return [target for target in targets if target.is_file() and target.is_relative_to(ROOT)]
