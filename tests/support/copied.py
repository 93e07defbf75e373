"""Converts a page to the text that a browser copies: separate blocks, a line per item, tabs between cells."""

from __future__ import annotations

from html.parser import HTMLParser

_BLOCKS = ("p", "table", "ul", "summary", "h1", "h2", "h3", "caption", "figcaption", "pre", "figure", "details")
_HIDDEN = ("script", "style", "svg")
_BEFORE = {"li": "\n", "tr": "\n", "td": "\t", "th": "\t"}


class _Copied(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.hidden = "", 0
        self.in_name = self.is_folded = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "details" and ("class", "name") in attrs:  # a kernel's label, with its full name folded
            self.in_name = True
        elif tag in _HIDDEN or (tag == "code" and self.is_folded):
            self.hidden += 1
        elif not self.in_name:
            self.text += "\n\n" if tag in _BLOCKS else _BEFORE.get(tag, "")

    def handle_endtag(self, tag: str) -> None:
        if tag in _HIDDEN or (tag == "code" and self.is_folded):
            self.hidden -= 1
        elif self.in_name:
            self.is_folded = tag == "summary" or (self.is_folded and tag != "details")
            self.in_name = tag != "details"
        else:
            self.text += "\n\n" if tag in _BLOCKS else ""

    def handle_data(self, data: str) -> None:
        self.text += data if data.strip() and not self.hidden else ""


def text_of(page: str) -> str:
    """Returns the text of a page, with all that is folded but the full names of kernels."""
    copied = _Copied()
    copied.feed(page)
    return "\n".join(line.removeprefix("\t") for line in copied.text.splitlines())
