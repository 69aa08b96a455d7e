"""Look through a built site for anything that a browser would load from another host."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

# What loads by itself; <a href> waits for a person.
_LOADING = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "object": ("data",),
    "form": ("action",),
}
# Only named, never fetched: what a page is the same as.
_NAMED = ("canonical", "alternate", "next", "prev")
_EXTERNAL = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)

_IN_STYLES = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)")


class Loads(HTMLParser):
    """The external addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what the element loads."""
        given = dict(attrs)
        if tag == "link" and given.get("rel") in _NAMED:
            return
        addresses = (given.get(name) or "" for name in _LOADING.get(tag, ()))
        self.found += [each for each in addresses if _EXTERNAL.match(each)]


def external(folder: Path) -> list[str]:
    """Page and address of all that is loaded from other hosts."""
    found = []
    for page in sorted(folder.rglob("*.html")):
        loads = Loads()
        loads.feed(page.read_text())
        found += [f"{page.relative_to(folder)}: {each}" for each in loads.found]
    for sheet in sorted(folder.rglob("*.css")):
        addresses = re.findall(
            r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)", sheet.read_text()
        )
        found += [f"{sheet.relative_to(folder)}: {each}" for each in addresses]
    return found


if __name__ == "__main__":
    wrong = external(Path(sys.argv[1]))
    print("\n".join(wrong) or "nothing is loaded from other hosts")
    sys.exit(bool(wrong))
