"""Hooks of the site: README is its home page, and links between docs/ and the rest of the repository work on it.

Pages are written with links that work in a checkout. On the site docs/ is the root, and a linked file that is elsewhere
in the repository stands under its own path.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )([^)\s#]+)(#[^)\s]*)?", flags=re.MULTILINE)
REMOTE = re.compile(r"[a-z]+:")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README as the home page, and every file outside of docs/ that a page links to."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    waiting = [file for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if files.get_file_from_path(_on_site(target)) is None:
                path = ROOT / target
                if not path.is_file():
                    raise PluginError(f"{page.src_uri} links to {target}, which is no file")
                files.append(File.generated(config, _on_site(target), abs_src_path=str(path)))
                if target.endswith(".md"):
                    waiting.append(files.get_file_from_path(target))  # type: ignore[arg-type]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links of the checkout into links of the site."""
    source, here = _in_checkout(page.file.src_uri), posixpath.dirname(page.file.src_uri)

    def replace(found: re.Match[str]) -> str:
        if REMOTE.match(found[2]):
            return found[0]
        target = posixpath.relpath(_on_site(_resolve(source, found[2])), here or ".")
        return f"{found[1]}{target}{found[3] or ''}"

    return "".join(part if code else LINK.sub(replace, part) for code, part in _parts(markdown))


def _targets(page: File) -> set[str]:
    """Files of the checkout that a page links to."""
    source = _in_checkout(page.src_uri)
    text = (ROOT / source).read_text(encoding="utf-8")
    links = (found[2] for code, part in _parts(text) if not code for found in LINK.finditer(part))
    return {_resolve(source, link) for link in links if not REMOTE.match(link)}


def _parts(markdown: str) -> list[tuple[bool, str]]:
    """The text, cut at fences; whether a part is code."""
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return [(part.startswith("```"), part) for part in parts]


def _resolve(source: str, link: str) -> str:
    """Path of a link's target in the checkout; a folder means its README."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return posixpath.join(target, "README.md") if (ROOT / target).is_dir() else target


def _in_checkout(src_uri: str) -> str:
    if src_uri == "index.md":
        return "README.md"
    inside = posixpath.join("docs", src_uri)
    return inside if (ROOT / inside).is_file() else src_uri


def _on_site(target: str) -> str:
    return "index.md" if target == "README.md" else target.removeprefix("docs/")
