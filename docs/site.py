"""What the site has besides docs/: the pages of the repository's root, and a reference of the public Python names.

A hook of MkDocs, which mkdocs.yml names. Links that leave docs/ lead to these pages, or to the repository.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    **{f"{name}.md": f"{name}.md" for name in ("CHANGELOG", "SUPPORT", "SECURITY", "CONTRIBUTING")},
}
"""Pages of the repository's root, and their names here."""
REFERENCE = "reference.md"
GROUPS = {
    "Reading": ("read_archive", "read_latest", "read_bucket", "list_files", "read_file", "save_file", "ArchivedFile"),
    "Capturing": ("Capture", "Config", "load", "OnStored", "StoredObject"),
    "Your own decoder and key": (
        "Decoder",
        "MessageBatch",
        "Decoded",
        "Failure",
        "BatchTooWideError",
        "KeyFunction",
        "layout",
    ),
    "Your own writer and store": ("BlockWriter", "EncodedBlock", "Store"),
    "Errors": ("JetcaptureError", "ConfigError", "SourceError", "StoreError", "PermanentStoreError", "DrainError"),
}
HERO = """\
<div class="hero" markdown>
![](docs/images/logo.svg)
<div markdown>
{title}

{about}

[Install and first capture](docs/first-capture.md){{ .md-button .md-button--primary }}
[How it compares](docs/compare.md){{ .md-button }}
</div>
</div>
"""
"""What the front page begins with."""
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_CONTENTS = re.compile(r"^- \[[^\n]*\]\(#[^\n]*\n?(?:  \[[^\n]*\n?)*", re.MULTILINE)
"""A line of a page's list of contents, which the site has beside the page."""
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def slug(title: str, separator: str = "-") -> str:
    """Return a heading's anchor, as Git hosts make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make anchors like those that links in the repository name."""
    config.mdx_configs["toc"]["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and pictures that lie elsewhere."""
    for name, here in PAGES.items():
        files.append(File.generated(config, here, content=(ROOT / name).read_text()))
    files.append(File.generated(config, REFERENCE, content=reference()))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.svg")):
        files.append(File.generated(config, f"images/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Lead links to their targets on the site, leave out lists of contents, and give the front page its head."""
    if page.file.src_uri == PAGES["README.md"]:
        markdown = front_page(markdown)
        page.meta["hide"] = ["navigation", "toc"]
    beginning, heading, rest = markdown.partition("\n## ")
    markdown = f"{_CONTENTS.sub('', beginning)}{heading}{rest}"
    here = next((name for name, there in PAGES.items() if there == page.file.src_uri), f"docs/{page.file.src_uri}")

    def lead(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups()
        return f"{before}{_target(target, here, page.file.src_uri, str(config.repo_url))}{anchor or ''}{after}"

    parts, end = [], 0
    for block in _CODE.finditer(markdown):
        parts += [_LINK.sub(lead, markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, _LINK.sub(lead, markdown[end:])])


def front_page(readme: str) -> str:
    """Return the README with a head of its own, and without the list of pages, which the navigation has."""
    title, about, rest = readme.split("\n\n", 2)
    body, _, end = rest.partition("## Read on")
    return f"{HERO.format(title=title, about=about)}\n{body}{end[end.index('Licensed under') :]}"


def _target(target: str, here: str, page: str, repository: str) -> str:
    if "://" in target or page == REFERENCE:
        return target
    path = normpath(str(PurePosixPath(here).parent / target))
    if path in PAGES:
        there = PAGES[path]
    elif path.startswith("docs/") and (ROOT / path).is_file():
        there = path.removeprefix("docs/")
    elif path.startswith("benchmarks/results/") and path.endswith(".svg"):
        there = f"images/{PurePosixPath(path).name}"
    elif (ROOT / path).exists():
        return f"{repository}/blob/main/{path}"
    else:
        return target  # MkDocs reports it
    return relpath(there, str(PurePosixPath(page).parent))


def reference() -> str:
    """Return the page on the public names: those that `from jetcapture_py import …` gives."""
    modules = dict(_exported())
    grouped = [name for names in GROUPS.values() for name in names]
    if sorted(grouped) != sorted(modules):
        raise ValueError(f"docs/site.py: GROUPS and jetcapture_py differ: {set(grouped) ^ modules.keys()}")
    text = ["# Python", "", "`from jetcapture_py import …` gives these names, and nothing else is promised.", ""]
    for title, names in GROUPS.items():
        text += [f"## {title}", ""]
        text += [f"::: {modules[name]}\n" for name in names]
    return "\n".join(text)


def _exported() -> Iterator[tuple[str, str]]:
    """Yield each public name, and the full name of what it is."""
    full_names = defaultdict[str, str](str)
    for node in ast.walk(ast.parse((ROOT / "jetcapture_py" / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jetcapture_py."):
            for alias in node.names:
                full_names[alias.name] = f"{node.module}.{alias.name}"
    yield from full_names.items()
