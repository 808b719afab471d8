"""What a report says, read from its HTML as a browser would; HTML that is not balanced is an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Self

_VOID = {"meta", "col", "link"}


@dataclass
class Element:
    """An element, its attributes, and what is in it."""

    name: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    def walk(self) -> Iterator[Element]:
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()

    @property
    def text(self) -> str:
        parts = (child if isinstance(child, str) else child.text for child in self.children)
        return " ".join(" ".join(parts).split())

    def all(self, name: str, class_: str | None = None) -> list[Element]:
        return [
            each
            for each in self.walk()
            if each.name == name and (class_ is None or class_ in (each.attributes.get("class") or "").split())
        ]

    def one(self, name: str, class_: str | None = None) -> Element:
        (found,) = self.all(name, class_)
        return found


class Page(HTMLParser):
    """A page, by its parts."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self._open = [self.root]
        self.feed(html)
        self.close()
        assert self._open == [self.root], f"not closed: {[each.name for each in self._open]}"

    @classmethod
    def of(cls, html: str) -> Self:
        assert html.startswith("<!doctype html>\n")
        return cls(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in {tag}"
        element = Element(tag, dict(attrs))
        self._open[-1].children.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].name == tag, f"</{tag}> closes <{self._open[-1].name}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)

    @property
    def elements(self) -> list[Element]:
        return list(self.root.walk())

    @property
    def verdict(self) -> str:
        return self.root.one("section", "verdict").one("h2").text

    @property
    def findings(self) -> list[str]:
        return [each.text for lists in self.root.all("ul", "findings") for each in lists.all("li")]

    @property
    def tiles(self) -> dict[str, str]:
        return {each.one("div", "label").text: each.one("div", "value").text for each in self.root.all("div", "tile")}

    def section(self, name: str) -> Element:
        (found,) = (each for each in self.root.all("section") if each.attributes.get("id") == name)
        return found

    def table(self, section: str, caption: str) -> list[dict[str, str]]:
        """The rows of the table whose caption begins so, by the columns' names."""
        tables = self.section(section).all("table")
        (found,) = (each for each in tables if each.one("caption").text.startswith(caption))
        names = [each.text for each in found.all("th")]
        rows = [[cell.text for cell in row.all("td")] for row in found.one("tbody").all("tr")]
        return [dict(zip(names, row, strict=True)) for row in rows]
