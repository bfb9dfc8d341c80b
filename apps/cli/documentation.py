"""``flower-graph docs``: the documentation where it is, in the package, the checkout or the web."""

from __future__ import annotations

import argparse
import webbrowser
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import flower_graph
from flower_graph.config.rules import suggest
from flower_graph.errors import ConfigError

SITE = Path(flower_graph.__file__).resolve().parent / "site"  # what `make docs` writes
GUIDES = SITE.parents[1] / "docs"  # of a checkout


def docs_command(args: argparse.Namespace) -> int:
    """Print the address of a page, and open it."""
    address = address_of(args.page)
    print(address)
    if not args.path:
        webbrowser.open(address)
    return 0


def address_of(page: str) -> str:
    """Find a page in the installed site, else among a checkout's guides, else on the web.

    Parameters
    ----------
    page
        Its name below ``docs/``, without an ending, or the end of it; behind ``#`` a heading's
        anchor.

    Raises
    ------
    ConfigError
        There is no such page, or this installation has no pages and names no address.

    """
    name, mark, anchor = page.partition("#")
    for folder, ending in ((SITE, ".html"), (GUIDES, ".md")):
        if (folder / f"index{ending}").is_file():
            return _in_folder(folder, ending, name).as_uri() + mark + anchor
    try:
        addresses = metadata("flower-graph").get_all("Project-URL") or []
    except PackageNotFoundError:
        addresses = []
    for address in addresses:
        if address.startswith("Documentation, "):
            return f"{address.removeprefix('Documentation, ')}/{name}.md{mark}{anchor}"
    raise ConfigError("docs: they were not built into this installation, which names no address")


def _in_folder(folder: Path, ending: str, name: str) -> Path:
    found = folder.rglob(f"*{ending}")
    pages = {_name(path.relative_to(folder).with_suffix("").as_posix()): path for path in found}
    exact = [page for page in pages if page == name or page.endswith(f"/{name}")]
    if name in pages or len(exact) == 1:
        return pages[name if name in pages else exact[0]]
    near = suggest(name, sorted(pages), "/")
    hint = f"did you mean {near}?" if near else f"there are {', '.join(sorted(_guides(pages)))}"
    raise ConfigError(f"docs {name}: no such page; {hint}")


def _name(page: str) -> str:
    """Name a folder's first page as the folder."""
    return page.removesuffix("/README").removesuffix("/index")


def _guides(pages: dict[str, Path]) -> list[str]:
    return [page for page in pages if "/" not in page]
