"""Lays the site out like the checkout, so that the pages' links are the same in both.

mkdocs takes pages from docs/ alone; README.md and what pages link to lie beside it.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[1]
_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "patches/README.md")
_LINK = re.compile(r"\]\(([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages, and each file that one of them links to, at their places in the checkout."""
    own = [file for file in files if file.src_dir == config.docs_dir]  # the rest is the theme's
    pages = [*_PAGES, *(f"docs/{file.src_uri}" for file in own if file.is_documentation_page())]
    linked = {path for page in pages for path in _links(page)}
    for file in own:
        files.remove(file)
    for path in sorted({*pages, *linked}):
        files.append(File(path, str(_ROOT), config.site_dir, config.use_directory_urls))
    return files


def _links(page: str) -> set[str]:
    """The files of the checkout that a page links to."""
    text = (_ROOT / page).read_text(encoding="utf-8")
    targets = ((_ROOT / page).parent / link for link in _LINK.findall(text) if "://" not in link)
    found = {target.resolve() for target in targets if target.is_file()}
    return {path.relative_to(_ROOT).as_posix() for path in found}
