"""What a build works out for a package index: the README with absolute links, and addresses.

All else is in pyproject.toml, and so is the one address that both need. The README's own links are
relative: they hold in a checkout, in any branch and on any host.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = PYPROJECT["tool"]["flower-graph"]["repository"].rstrip("/")
VERSION = "v" + PYPROJECT["project"]["version"]  # the tag of a release
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)]+)\)")


def absolute(link: re.Match[str]) -> str:
    """Write a relative link as one to the tagged file; without an address, as its words alone."""
    picture, words, target = link.groups()
    if not REPOSITORY:
        return words
    return f"{picture}[{words}]({REPOSITORY}/{'raw' if picture else 'blob'}/{VERSION}/{target})"


setup(
    long_description=LINK.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    project_urls={
        "Homepage": REPOSITORY,
        "Documentation": f"{REPOSITORY}/tree/{VERSION}/docs",
        "Changelog": f"{REPOSITORY}/blob/{VERSION}/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }
    if REPOSITORY
    else {},
)
