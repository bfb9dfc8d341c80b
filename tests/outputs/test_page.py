"""A page about runs stands alone, says what came out, and fits windows of any width."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import flower_graph as fg
from flower_graph.apps.cli.main import main
from flower_graph.method.page import page
from flower_graph.report.plots import bytes_panel

SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "csbm", "nodes": 60, "classes": 2, "num_features": 8, "active": 3},
    "data.split": "random",
    "data.ratios": [0.4, 0.3, 0.3],
    "partition": {"clients": 2, "method": "random"},
    "model.hidden": 4,
}
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
)
# What reaches beyond the window, besides what scrolls by itself
MEASURE = """<script>
const wide = [...document.querySelectorAll("body *")].filter(one => !one.closest(".scroll"))
  .filter(one => one.getBoundingClientRect().right > innerWidth + 1).map(one => one.tagName);
parent.postMessage(JSON.stringify({window: innerWidth, wide: wide,
  width: document.documentElement.scrollWidth,
  height: document.documentElement.scrollHeight}), "*");
</script></body>"""
# A browser's own window is never narrower than 500
FRAME = """<title></title><script>onmessage = event => { document.title = event.data; }</script>
<iframe src="page.html" style="width: {}px; height: 900px; border: 0"></iframe>"""


class Tags(HTMLParser):
    """Collects what a page has of elements, and all that they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names, self.references, self.open = set[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    metrics = {**SMALL, "metrics": ["accuracy", "macro-f1"]}
    fg.run("fedgta/cora-linqs", metrics, seed=(0, 1), out=folder / "several <i>", quiet=True)
    fedgls = {k: v for k, v in SMALL.items() if k != "model.hidden"} | {"graph.neighbours": 3}
    fg.run("fedgls/cora-linqs", fedgls, out=folder / "one", quiet=True)
    return folder


def test_a_page_stands_alone_and_has_all_that_is_known(folder: Path) -> None:
    text = page(folder / "several <i>")
    tags = Tags(text)
    assert not tags.open and {"script", "link", "iframe", "img", "i"}.isdisjoint(tags.names)
    assert all(one.startswith(("#", "data:image/png")) for one in tags.references)
    assert str(folder) not in text and "several &lt;i&gt;" in text
    summary = json.loads((folder / "several <i>" / "summary.json").read_text())
    reached = summary["test-accuracy-at-best-val"]
    assert f"{reached['mean']:.3f} ± {reached['std']:.3f}" in text
    found = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert [one.partition(" ")[0] for one in found] == [
        *("Loss", "Accuracy", "Macro-f1", "Bytes", "How", "Who", "Test", "Nodes", "Share"),
    ]
    assert "Comparison" not in text and "<td>model.hidden</td><td>4</td>" in text


def test_several_runs_are_compared_first(folder: Path) -> None:
    text = page(folder)
    links, places = re.findall('<a href="#(.*?)"', text), re.findall('<h2 id="(.*?)"', text)
    assert len(places) == 2 and links == places
    assert text.index("<h2>Comparison</h2>") < text.index(f'<h2 id="{places[0]}"')
    assert "no seed is judged on the same nodes" in text  # of FedGLS and nFedGNN
    assert "Learnt graphs against true ones" in text
    table = text[text.index("<table") : text.index("</table>")]
    assert table.index("test-accuracy") < table.index("strategy.name")


def test_the_command_writes_one_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "page.html"
    assert main(["report", str(folder / "one"), "--out", str(out)]) == 0
    assert out.read_text().startswith("<!DOCTYPE html>") and len([*out.parent.iterdir()]) == 1
    assert main(["report", str(folder / "one"), "--out", str(tmp_path / "page.pdf")]) == 2
    assert main(["report", str(tmp_path / "none"), "--out", str(out)]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.skipif(BROWSER is None, reason="no browser: chromium is not installed")
@pytest.mark.parametrize("width", [1400, 400])
def test_it_fits_a_window(width: int, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(folder).replace("</body>", MEASURE), encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("{}", str(width)), encoding="utf-8")
    shown = browse(frame, tmp_path, "--virtual-time-budget=5000", "--dump-dom")
    title = re.search("<title>(.*?)</title>", shown)
    assert title is not None
    measured = json.loads(title[1])
    assert (measured["window"], measured["width"], measured["wide"]) == (width, width, [])
    size = f"--window-size={width},{measured['height']}"
    browse(path, tmp_path, size, f"--screenshot={tmp_path / 'page.png'}")
    with Image.open(tmp_path / "page.png") as image:
        assert image.size == (width, measured["height"])
        assert len(set(image.convert("P").getdata())) > 10  # pictures are drawn


def browse(path: Path, folder: Path, *flags: str) -> str:
    assert BROWSER is not None
    words = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, path.as_uri()]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_panel_of_nothing_sent_is_drawn_without_a_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    assert "<svg" in bytes_panel({"up": [[0.0, 0.0]]})
    assert not recwarn.list
