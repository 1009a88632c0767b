"""The only place where a string becomes markup: a string is escaped unless this module made it.

Names, reasons, paths and generated texts come from users' grids and from libraries under test, so every
one of them is hostile until it went through here. `tag` builds HTML and SVG and escapes its children and
attributes; `json_block` is for data inside `<script>`; `markdown` is for table cells of a pull request.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Control characters that neither HTML nor XML may hold, and lone surrogates, which UTF-8 cannot.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
# Direction overrides make a reader see other text than there is; they are shown as escapes instead.
_BIDI = re.compile("[\u202a-\u202e\u2066-\u2069]")

_VOID = frozenset({"meta", "link", "input", "br", "col"})
_SVG_EMPTY = frozenset({"path", "rect", "line", "use", "circle"})


class Safe(str):
    """Markup that this module made: `tag` leaves it as it is."""

    __slots__ = ()


Child = object


def clean(value: object) -> str:
    """The string with what cannot be shown replaced, and what would mislead made visible.

    >>> clean("a\\x00b")
    'a\ufffdb'
    """
    plain = _FORBIDDEN.sub("\ufffd", str(value))
    return _BIDI.sub(lambda m: f"\\u{ord(m.group()):04x}", plain)


def text(value: Child) -> Safe:
    """Element content, HTML or SVG. None is nothing.

    >>> text("<img src=x onerror=1>")
    '&lt;img src=x onerror=1&gt;'
    """
    if isinstance(value, Safe):
        return value
    return Safe("" if value is None else html.escape(clean(value), quote=True))


def join(children: Iterable[Child], between: str = "") -> Safe:
    """Children side by side, each escaped unless already safe."""
    return Safe(text(between).join(text(c) for c in children))


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    # A newline inside an attribute is legal HTML, but XML readers turn it into a space.
    shown = "" if value is True else html.escape(clean(value), quote=True).replace("\n", "&#10;")
    return f' {name}="{shown}"'


def tag(name: str, /, *children: Child, **attributes: object) -> Safe:
    """An element. `class_` is class, `data_i` is data-i; None and False attributes are left out.

    >>> tag("td", "a < b", title='"', class_="n")
    '<td title="&quot;" class="n">a &lt; b</td>'
    >>> tag("path", d="M0 0")
    '<path d="M0 0"/>'
    """
    head = name + "".join(_attribute(k, v) for k, v in attributes.items())
    if name in _VOID:
        return Safe(f"<{head}>")
    if name in _SVG_EMPTY and not children:
        return Safe(f"<{head}/>")
    return Safe(f"<{head}>{join(children)}</{name}>")


def strict(data: Any) -> Any:
    """Data that a strict JSON parser reads back: NaN and infinities become null, unknown things their text.

    >>> strict({"a": [float("nan"), 1.5]})
    {'a': [None, 1.5]}
    """
    if data is None or isinstance(data, bool | int):
        return data
    if isinstance(data, str):
        return clean(data)
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {clean(k): strict(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [strict(v) for v in data]
    return clean(data)


def json_block(data: Any) -> Safe:
    """Compact strict JSON for inside `<script>`: no `<`, so no tag, comment or end of script can appear.

    >>> json_block({"id": "</script>"})
    '{"id":"\\\\u003c/script>"}'
    """
    raw = json.dumps(strict(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<\u2028\u2029":
        raw = raw.replace(char, f"\\u{ord(char):04x}")
    return Safe(raw)


_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|~#&!])")


def markdown(value: object) -> str:
    """One line of Markdown text that shows the string itself, also inside a table cell.

    >>> markdown("a|b <img> x_y")
    'a\\\\|b \\\\<img\\\\> x\\\\_y'
    """
    line = " ".join(clean("" if value is None else value).split())
    return _MARKDOWN.sub(r"\\\1", line)


def code(value: object) -> str:
    """A Markdown code span that no backtick or pipe in the string can leave.

    >>> code("a`b")
    '`` a`b ``'
    """
    line = " ".join(clean("" if value is None else value).split()).replace("|", "\\|")
    if "`" not in line:
        return f"`{line}`" if line else ""
    fence = "`" * (max(len(run) for run in re.findall("`+", line)) + 1)
    return f"{fence} {line} {fence}"
