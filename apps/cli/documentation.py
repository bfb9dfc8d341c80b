"""``flower-graph docs``: opens the documentation of the package or the checkout.

A page of the site is opened in the browser. Without a site the page's source is printed, with the
tables that are generated from code.
"""

import argparse
import inspect
import re
import sys
import webbrowser
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from urllib.parse import unquote, urlparse

import flower_graph
from flower_graph.apps.cli.say import say
from flower_graph.config.rules import suggest
from flower_graph.errors import ConfigError
from flower_graph.storage.reading import MOST_RECORD, read_text

SITE = Path(flower_graph.__file__).resolve().parent / "site"  # what `make docs` writes
# The pages as they are written: installed, or in a checkout
GUIDES = next(
    (one for one in (SITE.with_name("docs"), SITE.parents[1] / "docs") if one.is_dir()), SITE
)
HEADING = re.compile(r"^(#+) +(.+)$", re.MULTILINE)
# What only Sphinx reads: public names, in a block of its own language
NAMED = re.compile(r"^\.\. auto\w+:: flower_graph\.([\w.]+)$\n( +:.*\n)*", re.MULTILINE)
SPHINX = re.compile(r"^```{eval-rst}\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def docs_command(args: argparse.Namespace) -> int:
    """Open a page, or print it where there is no site."""
    address = address_of(args.page)
    path, _, anchor = address.partition("#")
    if path.endswith(".md") and not args.path:
        say(text_of(Path(unquote(urlparse(path).path)), anchor))
        return 0
    say(address)
    if not args.path:
        webbrowser.open(address)
    return 0


def text_of(page: Path, anchor: str = "") -> str:
    """Return a page's text with its tables; with an anchor, only that heading's section."""
    text = read_text(page, MOST_RECORD)
    if (GUIDES / "generate.py").is_file():
        sys.path.insert(0, str(GUIDES))
        # The promises' tables are made of files of the tests, which are in a checkout alone.
        with suppress(FileNotFoundError):
            filled: str = import_module("generate").filled(page.stem, text)
            text = SPHINX.sub(lambda found: NAMED.sub(_described, found[1]), filled)
    headings = [*HEADING.finditer(text)]
    for place, one in enumerate(headings):
        if anchor and re.sub(r"[^\w -]", "", one[2].lower()).replace(" ", "-") == anchor:
            after = (later for later in headings[place + 1 :] if len(later[1]) <= len(one[1]))
            return text[one.start() : getattr(next(after, None), "start", lambda: len(text))()]
    return text


def _described(found: re.Match[str]) -> str:
    value = attrgetter(found[1])(flower_graph)
    return f"- `fg.{found[1]}`: {(inspect.getdoc(value) or '').partition(chr(10))[0]}\n"


def address_of(page: str) -> str:
    """Find a page in the installed site, else among the guides as they are written.

    ``page`` is the page's name below ``docs/``, without an ending, or the end of that name; behind
    ``#`` a heading's anchor. ``ConfigError`` if there is no such page.
    """
    name, mark, anchor = page.partition("#")
    for folder, ending in ((SITE, ".html"), (GUIDES, ".md")):
        if (folder / f"index{ending}").is_file():
            pages = {_name(path, folder): path for path in folder.rglob(f"*{ending}")}
            ends = [one for one in pages if one.endswith(f"/{name}")]
            found = pages.get(name) or (pages[ends[0]] if len(ends) == 1 else None)
            if found is not None:
                return found.as_uri() + mark + anchor
            near = suggest(name, sorted(pages), "/")
            guides = ", ".join(sorted(page for page in pages if "/" not in page))
            hint = f"did you mean {near}?" if near else f"there are {guides}"
            raise ConfigError(f"docs {name}: no such page; {hint}")
    raise ConfigError("docs: they were not built into this installation")


def _name(path: Path, folder: Path) -> str:
    name = path.relative_to(folder).with_suffix("").as_posix()
    return name.removesuffix("/README").removesuffix("/index")
