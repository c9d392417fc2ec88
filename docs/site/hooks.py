"""Pages that include files of the repository's root; what the site folds away; the version beside the name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# The file of a page, and the prefixes of links that a page below docs writes otherwise.
INCLUDED = {
    "index.md": ("README.md", {"](docs/": "](", "](CONTRIBUTING.md": "](contributing.md"}),
    "changelog.md": ("CHANGELOG.md", {"](docs/": "]("}),
    "contributing.md": ("CONTRIBUTING.md", {"](docs/": "](", "](DESIGN.md": "](design/index.md"}),
    "design/index.md": ("DESIGN.md", {"](docs/design/": "](", "](docs/": "](../"}),
    "examples.md": ("examples/README.md", {}),
}
ON_THE_HOME_PAGE = (
    "Go on with the [quick start](quick_start.md), or with [your trainer](integrations.md): most need one line.\n"
)


def on_config(config: Any) -> Any:
    """Show the version beside the name."""
    version = re.search(r'"(.+)"', (ROOT / "pyactcomp" / "_version.py").read_text())
    assert version is not None
    config.site_name += f" {version[1]}"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Include a file of the root with links that hold in docs, and fold away what few readers look for."""
    name = page.file.src_uri
    if name in INCLUDED:
        path, links = INCLUDED[name]
        markdown = (ROOT / path).read_text(encoding="utf-8")
        for at_root, here in links.items():
            markdown = markdown.replace(at_root, here)
    if name == "index.md":
        markdown = markdown.partition("## Use\n")[0] + ON_THE_HOME_PAGE
    if name == "examples.md":
        markdown = _with_sources(markdown)
    return _folded(markdown)


def _with_sources(markdown: str) -> str:
    """Return the page of the examples with each example's program below."""
    for file in re.findall(r"\]\((\w+\.py)\)", markdown):
        markdown = markdown.replace(f"]({file})", f"](#{file.replace('.', '')})")
        markdown += f"\n## {file}\n\n```python\n{(ROOT / 'examples' / file).read_text().rstrip()}\n```\n"
    return markdown


def _folded(markdown: str) -> str:
    """Fold conditions of measurements and lists of failures, which are long; name tests in tooltips."""
    markdown = re.sub(
        r"^(Measured on ([^;\n]+);.{200,})$",
        lambda found: _details(f"Measured on {found[2]}: versions, commits and commands", found[1]),
        markdown,
        flags=re.MULTILINE,
    )
    markdown = re.sub(
        r"(?:^- .*\n){12,}(?=\n?<!-- /bench)",
        lambda found: _details(f"{found[0].count(chr(10))} reasons", found[0]) + "\n",
        markdown,
        flags=re.MULTILINE,
    )
    return re.sub(
        r"^\|.*`tests/.*\|$",
        lambda found: re.sub(r"`(tests/[^`]+)`", r'<abbr title="\1">test</abbr>', found[0]),
        markdown,
        flags=re.MULTILINE,
    )


def _details(summary: str, content: str) -> str:
    return f'<details markdown="1"><summary>{summary}</summary>\n\n{content}\n</details>\n'
