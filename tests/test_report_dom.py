"""A small reader of the report's HTML, for its tests, and the tests of that reader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

import pytest

VOID = {"meta", "link", "input", "br", "col"}


@dataclass
class Node:
    """An element: its name, attributes, and what is in it."""

    name: str
    attributes: dict[str, str]
    children: list[Node | str] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def all(self, name: str = "", **attributes: str) -> list[Node]:
        """Every element below this one of that name with those attributes; `class_` needs to be one of the classes."""
        wanted = {k.rstrip("_").replace("_", "-"): v for k, v in attributes.items()}
        return [
            n for n in self.walk() if n is not self and name in ("", n.name) and all(n.has(*w) for w in wanted.items())
        ]

    def one(self, name: str = "", **attributes: str) -> Node:
        found = self.all(name, **attributes)
        assert len(found) == 1, f"{len(found)} of {name} {attributes}"
        return found[0]

    def has(self, key: str, value: str) -> bool:
        held = self.attributes.get(key)
        return held is not None and (value in held.split() if key == "class" else held == value)

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    @property
    def words(self) -> str:
        """The text with white space run together."""
        return " ".join(self.text.split())


class Reader(HTMLParser):
    """Refuses what a browser would silently repair: elements that are not closed in order, attributes given twice."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [k for k, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> names an attribute twice: {names}"
        node = Node(tag, {k: v or "" for k, v in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Node(tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> closes <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(page: str) -> Node:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert len(reader.open) == 1, f"never closed: {[n.name for n in reader.open[1:]]}"
    return reader.root


def test_it_reads_elements_attributes_and_text() -> None:
    root = parse('<div class="a b"><p id="x">1 &lt; 2</p><br><svg><use href="#k"/></svg></div>')
    assert root.one("p").text == "1 < 2"
    assert root.one("div", class_="b").one("use").attributes == {"href": "#k"}


@pytest.mark.parametrize("wrong", ["<b><i></b></i>", "<p>", '<p id="a" id="b"></p>'])
def test_it_refuses_what_a_browser_repairs(wrong: str) -> None:
    with pytest.raises(AssertionError):
        parse(wrong)
