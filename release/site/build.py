"""Builds the documentation site in both languages into build/site, and checks every link in it: `make site`.

The English site is at the top, and the Chinese one in `zh/`. Warnings from MkDocs and broken links within the site are
errors. docs/decisions/0009-documentation-site.md explains this design.
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SITE = ROOT / "build" / "site"
sys.path.insert(0, str(HERE))  # for hooks.py, which MkDocs loads by path

import jieba  # noqa: E402
from checking import broken_links  # noqa: E402
from mkdocs.commands.build import build  # noqa: E402
from mkdocs.config import load_config  # noqa: E402
from mkdocs.exceptions import Abort  # noqa: E402
from site_search import terms  # noqa: E402


def build_language(language: str) -> None:
    """Builds the site of one language; raises `Abort` if there was a warning."""
    changed = {} if language == "en" else {"docs_dir": str(ROOT / "docs" / "zh"), "site_dir": str(SITE / "zh")}
    config = load_config(str(HERE / "mkdocs.yml"), **changed)
    config.theme["language"] = language
    if language == "zh":
        config.exclude_docs = None
        # MkDocs cannot resolve links to the other site, which broken_links checks
        config.validation.nav.not_found = config.validation.links.not_found = logging.INFO
    config.plugins.on_startup(command="build", dirty=False)
    try:
        build(config)
    finally:
        config.plugins.on_shutdown()


def main() -> int:
    """Builds and checks the site; returns the exit code."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    shutil.rmtree(SITE, ignore_errors=True)
    SITE.mkdir(parents=True)
    jieba.setLogLevel(logging.WARNING)
    jieba.dt.tmp_dir = str(SITE.parent)  # jieba's cache of its dictionary
    for term in terms():
        jieba.add_word(term)
    for language in ("en", "zh"):  # English first, because MkDocs empties its output directory
        print(f"==> Building the site in {language}", flush=True)
        try:
            build_language(language)
        except Abort as error:
            print(f"==> {error}", file=sys.stderr)
            return 1
    broken = broken_links(SITE)
    print("\n".join(broken), end="\n" if broken else "")
    pages = len(list(SITE.rglob("*.html")))
    print(
        f"==> {pages} pages, {len(broken)} broken links. To look at them: python -m http.server --directory build/site"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
