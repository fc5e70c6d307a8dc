"""The code blocks of READMEs and docs, and what the comments before a block say about running it.

A comment on the lines before a block is ``<!-- NAME: VALUE -->``; `MARKS` lists the names. Readers don't see it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("examples/*/README.md"),
    ]
)
LANGUAGES = {"python", "bash", "text", "yaml", "toml", "json", "diff"}
MARKS = {
    "not run": "why the block can't run on one machine without accelerators; its syntax is checked",
    "ranks": "how many ranks run it; 2 if it launches, else 1",
    "continues": "the block follows the previous Python block, or the one of that number, in the same script",
    "slow": "why it is left out of the default run",
}
_BLOCK = re.compile(r"((?:^<!-- [^\n]+ -->\n)*)^```(\w*)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"<!-- ([\w ]+?)(?:: (.+?))? -->")


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        page: The file that has it, relative to the repository.
        number: Its position among the page's blocks of this language.
        language: The word after the fence.
        title: The name of the file that it shows, if any.
        text: The code; for Python, with the code of the blocks that it continues.
        marks: What the comments before it say.
    """

    page: str
    number: int
    language: str
    title: str | None
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    def __str__(self):
        return f"{self.page}-{self.language}-{self.number}"


def blocks_of(page):
    """Return the code blocks of a page.

    Raises:
        ValueError: If a block has no language or no end, or a comment before it is unknown.
    """
    found = []
    name = str(page.relative_to(ROOT))
    page_text = page.read_text(encoding="utf-8")
    for comments, language, info, text in _BLOCK.findall(page_text):
        if name.startswith("docs/") and language not in LANGUAGES:
            msg = f"{name}: a block starts with ```{language}. Use one of {', '.join(sorted(LANGUAGES))}."
            raise ValueError(msg)
        marks = dict(_MARK.findall(comments))
        unknown = marks.keys() - MARKS.keys()
        if unknown:
            msg = f"{name}: a block has the unknown comment {', '.join(unknown)}. Use {', '.join(MARKS)}."
            raise ValueError(msg)
        same = [block for block in found if block.language == language]
        title = re.search(r'title="([^"]+)"', info)
        whole = f"{same[int(marks['continues'] or -1)].text}\n{text}" if "continues" in marks else text
        found.append(Block(name, len(same), language, title and title[1], whole, marks))
    num_fences = len(re.findall(r"^ *```", page_text, re.MULTILINE))
    if num_fences != 2 * len(found):
        msg = f"{name}: {num_fences} lines start with ```, and {len(found)} blocks were read. Start each in column 0."
        raise ValueError(msg)
    return found


def all_blocks(*languages):
    """Return the blocks of all pages in some languages."""
    return [block for page in PAGES for block in blocks_of(page) if block.language in languages]


def write_files(page, folder):
    """Write the files that a page shows into a folder."""
    for block in blocks_of(ROOT / page):
        if block.title is not None:
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
