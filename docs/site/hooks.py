"""Pages that include files of the repository's root: their links start at the root, and the site's at docs."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Include CONTRIBUTING.md with links that hold in docs."""
    if page.file.src_uri != "contributing.md":
        return markdown
    with open("CONTRIBUTING.md", encoding="utf-8") as file:
        return file.read().replace("](docs/", "](")
