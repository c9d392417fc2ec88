"""Pages that include files of the repository's root: links start at the root there, and at the page's folder here."""

from __future__ import annotations

from typing import Any

# The file of a page, and the prefixes of links that a page below docs writes otherwise.
INCLUDED = {
    "contributing.md": ("CONTRIBUTING.md", {"](docs/": "](", "](DESIGN.md": "](design/index.md"}),
    "design/index.md": ("DESIGN.md", {"](docs/design/": "](", "](docs/": "](../"}),
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Include a file of the root with links that hold in docs."""
    if page.file.src_uri not in INCLUDED:
        return markdown
    path, links = INCLUDED[page.file.src_uri]
    with open(path, encoding="utf-8") as file:
        text = file.read()
    for at_root, here in links.items():
        text = text.replace(at_root, here)
    return text
