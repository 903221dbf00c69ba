"""Reading HTML and looking at it, for the tests of the report."""

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

FETCHED = ("src", "srcset", "poster", "data", "action", "background", "xlink:href")
VOID = ("img", "meta", "link", "br", "use")


@dataclass
class Element:
    """A start tag with its attributes, and all the text within it."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    children: list["Element"] = field(default_factory=list)

    def find(self, tag: str, **attributes: str) -> list["Element"]:
        """All elements below this one, in document order; `class_` must be among the classes."""
        found = []
        for child in self.children:
            wanted = {key.rstrip("_"): value for key, value in attributes.items()}
            if child.tag == tag and all(
                value in child.attributes.get(key, "").split() for key, value in wanted.items()
            ):
                found.append(child)
            found += child.find(tag, **attributes)
        return found

    def everything(self) -> list["Element"]:
        return [below for child in self.children for below in (child, *child.everything())]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("document", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data


def parse(html: str) -> Element:
    """The document; fails where tags do not nest."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert len(reader.open) == 1, f"<{reader.open[-1].tag}> is never closed"
    return reader.open[0]


def squeezed(text: str) -> str:
    return " ".join(text.split())


def table(document: Element, caption: str) -> list[list[str]]:
    """The cells of the table whose caption starts so, row by row, the header first."""
    (found,) = [t for t in document.find("table") if squeezed(t.find("caption")[0].text).startswith(caption)]
    return [[squeezed(cell.text) for cell in row.children] for row in found.find("tr")]


def fetches(document: Element) -> list[str]:
    """Every address that a browser would ask for while it shows the page."""
    asked = []
    for element in document.everything():
        for name in FETCHED:
            asked += [element.attributes[name]] if name in element.attributes else []
        if element.tag != "a" and "href" in element.attributes:
            asked.append(element.attributes["href"])
        if element.tag == "style":
            asked += re.findall(r"url\(([^)]*)\)|@import\s+(\S+)", element.text)
        asked += re.findall(r"url\(([^)]*)\)", element.attributes.get("style", ""))
    return [address for address in asked if not str(address).startswith(("data:", "#"))]


def chromium(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run headless Chromium, or skip the test where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on the PATH to look at the page with")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
    quiet += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = [program, *quiet, f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
