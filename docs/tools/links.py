"""Takes into the site what its pages link to outside of docs/: figures, examples, CONTRIBUTING and the like.

A page is written for the repository, where `../results/crossover.png` leads out of docs/. In the site that file stands
at `results/crossover.png`, and the link is changed accordingly. What is no file (a folder) becomes plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from posixpath import dirname, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file outside of docs/ that a page links to, and what these link to in turn."""
    waiting = [file for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = waiting.pop()
        source = Path(page.abs_src_path or "")
        for _, _, target in LINK.findall(source.read_text(encoding="utf-8")):
            found = _outside(source, target, config)
            if found is None or files.get_file_from_path(_uri(found)) or not found.is_file():
                continue
            if found.suffix == ".py" and found.is_relative_to(ROOT / "hcsim"):
                continue
            added = File(_uri(found), str(ROOT), config.site_dir, config.use_directory_urls)
            files.append(added)
            if found.suffix == ".md":
                waiting.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links point to where these files are in the site."""
    source = Path(page.file.abs_src_path or "")

    def changed(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        found = _outside(source, target, config)
        if found is None or not found.exists():
            return match[0]
        if not files.get_file_from_path(_uri(found)):
            return text
        anchor = target.partition("#")[2]
        there = relpath(_uri(found), dirname(page.file.src_uri) or ".")
        return f"{image}[{text}]({there}{'#' + anchor if anchor else ''})"

    return LINK.sub(changed, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that fetches something from elsewhere when it is read."""
    fetched = re.findall(r'<(?:script|img|link)\b[^>]*\b(?:src|href)="?((?:https?:)?//[^">\s]+)', output)
    if fetched:
        raise PluginError(f"{page.file.src_uri} would fetch {fetched[0]}")
    return output


def _outside(source: Path, target: str, config: MkDocsConfig) -> Path | None:
    """What a link of the repository means, where the same link would mean something else in the site."""
    path = target.partition("#")[0]
    if "://" in target or not path:
        return None
    found = Path(os.path.normpath(source.parent / path))
    docs = Path(config.docs_dir)
    if found.is_relative_to(docs) and source.is_relative_to(docs):
        return None
    return found if found.is_relative_to(ROOT) else None


def _uri(file: Path) -> str:
    docs = ROOT / "docs"
    return file.relative_to(docs if file.is_relative_to(docs) else ROOT).as_posix()
