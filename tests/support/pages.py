"""An HTML page as a tree, read strictly: what is opened is closed, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"input", "link", "meta", "br", "hr", "img", "path"}


@dataclass
class Element:
    """An element; its parts are elements and text."""

    tag: str
    attributes: dict[str, str | None]
    parts: list[Element | str] = field(default_factory=list)

    def walk(self) -> Iterator[Element]:
        """Itself and all that is inside."""
        yield self
        for part in self.parts:
            if isinstance(part, Element):
                yield from part.walk()

    def all(self, tag: str) -> list[Element]:
        """Those of a tag."""
        return [element for element in self.walk() if element.tag == tag]

    @property
    def text(self) -> str:
        """Its text, in words that a single space parts."""
        return " ".join("".join(self._texts()).split())

    def _texts(self) -> Iterator[str]:
        for part in self.parts:
            if isinstance(part, str):
                yield part
            else:
                yield from part._texts()

    def at(self, length: int) -> Element:
        """The same without what is shown of other lengths."""
        kept: list[Element | str] = []
        for part in self.parts:
            if isinstance(part, Element):
                lengths = part.attributes.get("data-at")
                if lengths is not None and str(length) not in lengths.split():
                    continue
                part = part.at(length)
            kept.append(part)
        return Element(self.tag, self.attributes, kept)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"{tag}: an attribute twice"
        element = Element(tag, dict(attrs))
        self._open[-1].parts.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].parts.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> in <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].parts.append(data)

    def read(self, text: str) -> Element:
        self.feed(text)
        self.close()
        assert self._open == [self.root], f"<{self._open[-1].tag}> is left open"
        return self.root


def read_page(text: str) -> Element:
    """The page's tree.

    Raises:
        AssertionError: elements that are not closed in order, or an attribute twice.
    """
    return _Reader().read(text)
