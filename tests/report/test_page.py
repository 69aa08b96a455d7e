"""Reports: what they say, that every name in them is only text, and how a browser shows them."""

from __future__ import annotations

import html
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import estimator as est
from estimator import estimate
from estimator.advise.rent.offers import hourly_usd, offers
from estimator.advise.scaling import Scaling, sweep
from estimator.errors import PriceError, StoreError
from estimator.estimates.estimate import Estimate
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.prices import Price, PriceList
from estimator.placement.allocation import Allocation
from estimator.report import sections as all_sections
from estimator.report.facts import answer_facts
from estimator.report.page import page, write_figures
from estimator.report.pictures import shades, title_of, tracks_of
from estimator.timeline.simulator.tasks import Span, Timeline
from estimator.units import time_unit
from tests.synthetic import Machine, perceptron

pytest.importorskip("matplotlib")

HOSTILE = "<script>alert(1)</script>&\"'$\\frac{1}$<img src=http://a.example/x>"


class Elements(HTMLParser):
    """What a page is made of, and the texts outside of scripts and styles."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        loads = ("src", "href", "xlink:href", "data", "action", "poster", "srcset")
        self.addresses += [value or "" for name, value in attrs if name in loads]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def graph() -> OpGraph:
    return replace(perceptron([256, 256, 256], target="cuda"), name=HOSTILE)


@pytest.fixture
def answer(graph: OpGraph) -> Estimate:
    return estimate(graph, "2x2:t4-g4dn")


@pytest.fixture
def content(graph: OpGraph, answer: Estimate) -> str:
    rows = sweep(["1x1:t4-g4dn", "2x2:t4-g4dn"], lambda text: estimate(graph, text))
    more = [
        all_sections.timeline_section(answer),
        all_sections.scaling_section(rows),
        *all_sections.drawn_memory_sections(answer),
        all_sections.layouts_section(answer, lambda s, layout: estimate(graph, "2x2:t4-g4dn")),
        all_sections.cost_section(rows, PriceList.load()),
        # Names of operators have no spaces either.
        all_sections.Section("long", sentences=(f"aten.{'long_' * 20}",)),
    ]
    return page(HOSTILE, all_sections.estimate_sections(answer, more=more, verbose=True))


@pytest.mark.parametrize(("strategy", "micro_batches"), [("ddp", 1), ("ddp", 3), ("fsdp", 10)])
def test_pictures_of_the_timeline_and_of_memory_end_with_the_step(
    graph: OpGraph, strategy: str, micro_batches: int
) -> None:
    answer = estimate(graph, "2x2:t4-g4dn", strategy=strategy, accumulation_steps=micro_batches)
    timeline = all_sections.timeline_section(answer).figure.axes[0]
    memory = all_sections.drawn_memory_sections(answer)[0].figure.axes[0]
    unit_s, _ = time_unit(answer.step_time_s)
    end = answer.step_time_s / unit_s
    assert timeline.get_xlim()[1] == pytest.approx(end)
    assert memory.get_xlim()[1] == pytest.approx(end)
    # Of several micro-batches memory is that of the last one, which ends like the others.
    begun = memory.get_xlim()[0] / end
    assert begun == 0.0 if micro_batches == 1 else begun > 0.4


def test_names_are_text_and_nothing_else(content: str) -> None:
    found = Elements(content)
    assert found.tags.count("script") == 1
    assert "img" not in found.tags
    assert found.text.count(HOSTILE) >= 3, "as heading, and as title of two figures"


def test_a_page_loads_nothing(content: str) -> None:
    found = Elements(content)
    assert [each for each in found.addresses if not each.startswith("#")] == []
    assert "url(http" not in content
    assert "@import" not in content
    assert "default-src 'none'" in content


def test_an_estimate_in_a_notebook_shows_its_parts_and_escapes_names(answer: Estimate) -> None:
    found = Elements(answer._repr_html_())
    assert HOSTILE in found.text
    assert {"script", "img"}.isdisjoint(found.tags)
    assert "step time" in found.text
    assert all(sentence in found.text for sentence in answer.assumptions)


def test_the_parts_of_the_step_fill_it(answer: Estimate) -> None:
    table = all_sections.breakdown_section(answer).table
    assert sum(table.bars) == pytest.approx(1.0)


def _span(start_s: float, duration_s: float, phase: str = "forward", lane: str = "compute") -> Span:
    return Span(name="mm", rank=0, lane=lane, start_s=start_s, duration_s=duration_s, phase=phase)


def test_neighbours_too_short_to_see_are_one_bar() -> None:
    # Bars below 1/1500 of 1.5 s are joined: four of 0.3 ms begin within the first millisecond.
    short = [_span(3e-4 * number, 3e-4) for number in range(4)]
    other = _span(1.2e-3, 1e-4, "backward")
    long = _span(1.0, 0.25, "backward")
    step = Timeline(step_time_s=1.5, spans=[*short, other, long], ranks_like=(0, 0))
    (track,) = tracks_of(step)
    assert track.label == "compute"
    assert [(bar.start_s, bar.end_s, bar.kind) for bar in track.bars] == [
        (0.0, pytest.approx(1.2e-3), "forward"),
        (1.2e-3, pytest.approx(1.3e-3), "backward"),
        (1.0, 1.25, "backward"),
    ]
    assert track.bars[0].words.startswith("4 short operators, forward: 1.20 ms")


def test_spans_at_once_stand_on_tracks_of_their_own() -> None:
    spans = [_span(0.0, 1.0, lane="network"), _span(0.5, 1.0, lane="network")]
    found = tracks_of(Timeline(step_time_s=1.5, spans=spans, ranks_like=(0,)))
    assert [len(track.bars) for track in found] == [1, 1]


def test_cost_counts_whole_instances(graph: OpGraph) -> None:
    prices = PriceList(
        [
            Price(machine="t4-g4dn", instance_type="small", devices=1, usd_per_hour=1.0),
            Price(machine="t4-g4dn", instance_type="large", devices=4, usd_per_hour=3.0),
        ]
    )
    assert hourly_usd(prices, Allocation.parse("1x1:t4-g4dn")) == 1.0
    assert hourly_usd(prices, Allocation.parse("2x2:t4-g4dn")) == 6.0
    rows = sweep(["2x2:t4-g4dn"], lambda text: estimate(graph, text))
    section = all_sections.cost_section(rows, prices, samples=3600 * 1e4)
    answer = rows[0].answer
    assert answer.samples_per_s
    assert section.table
    # So many samples take 1e4 hours over samples/s, in whole seconds.
    hours = math.ceil(3600 * 1e4 / answer.samples_per_s) / 3600
    assert section.table.rows[0][1] == "fits"
    assert section.table.rows[0][4] == f"{6.0 * hours:.2f}"


def test_a_report_and_a_plan_bill_the_least_time_that_is_sold(graph: OpGraph) -> None:
    minute = Price(
        machine="t4-g4dn",
        instance_type="a",
        devices=4,
        usd_per_hour=36.0,
        billed_s=10.0,
        least_billed_s=60.0,
    )
    allocation, prices = "2x4:t4-g4dn", PriceList([minute])
    rows = sweep([allocation], lambda text: estimate(graph, text))
    rate = rows[0].answer.samples_per_s if rows[0].answer else None
    assert rate
    # Two instances at 0.01 USD a second: a second is paid as 60 s, 61 s as 70 s.
    for duration_s, usd in ((1.0, 1.20), (61.0, 1.40)):
        samples = duration_s * rate
        table = all_sections.cost_section(rows, prices, samples=samples).table
        assert table.rows[0][4] == f"{usd:.2f}"
        asked: dict[str, Any] = {"samples": samples, "prices": prices, "strategies": ("ddp",)}
        asked["batch_per_gpu"] = graph.batch
        assert offers(graph, [allocation], **asked).offers[0].usd == pytest.approx(usd)


def test_a_machine_without_a_price_is_said(graph: OpGraph) -> None:
    rows = sweep(["1x1:dgx-a100"], lambda text: estimate(graph, text))
    section = all_sections.cost_section(rows, PriceList.load())
    assert section.table is None
    assert "no price of 'dgx-a100' is known" in section.sentences[0]
    with pytest.raises(PriceError, match="names a host, which has no price"):
        hourly_usd(PriceList.load(), Allocation.parse("a1[0,1]"))


def test_layouts_list_what_is_refused_with_its_reason(graph: OpGraph, answer: Estimate) -> None:
    section = all_sections.layouts_section(
        answer,
        lambda strategy, layout: estimate(
            graph, "2x2:t4-g4dn", strategy=strategy, layout=layout and "tp=3,dp=*"
        ),
    )
    assert {row[0] for row in section.table.rows} == {"ddp", "zero1", "zero2", "fsdp"}
    assert section.items[0].startswith("tp=2,dp=*, ddp: ")


@pytest.mark.parametrize("absent", ["matplotlib.figure", "matplotlib.patches"])
def test_without_matplotlib_a_timeline_says_what_to_install(
    answer: Estimate, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(StoreError, match=r"install throughput-estimator\[report"):
        all_sections.timeline_section(answer)


def test_figures_are_written_as_png_and_svg(answer: Estimate, tmp_path: Path) -> None:
    sections = [
        all_sections.timeline_section(answer),
        *all_sections.drawn_memory_sections(answer),
        all_sections.breakdown_section(answer),
    ]
    found = write_figures(sections, tmp_path / "figures")
    names = ["timeline.png", "timeline.svg", "memory.png", "memory.svg"]
    assert [path.name for path in found] == names
    assert found[0].read_bytes().startswith(b"\x89PNG")
    assert found[1].read_text().startswith("<?xml")


ACTED = """<script>
document.querySelector('[data-zoom="2"]').click();
const seen = [document.querySelector(".timeline svg").getAttribute("viewBox"),
  document.documentElement.scrollWidth - document.documentElement.clientWidth,
  ...[...document.querySelectorAll(".timeline .ends span")].map((each) => each.textContent)];
document.body.setAttribute("data-seen", seen.join("|"));
</script></body>"""
# No window is as narrow as a telephone: a frame is.
FRAMED = """<body>
<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{page}"></iframe>
<script>addEventListener("load", () => document.body.setAttribute(
  "data-seen", document.querySelector("iframe").contentDocument.body.dataset.seen));
</script></body>"""


@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_zooms_the_timeline_and_never_scrolls_the_page_sideways(
    content: str, answer: Estimate, tmp_path: Path, width: int
) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium here to open the page with")
    path = tmp_path / "report.html"
    # The page allows no script but its own.
    open_to_all = re.sub(r"<meta http-equiv=[^>]*>", "", content)
    acted = html.escape(open_to_all.replace("</body>", ACTED))
    path.write_text(FRAMED.format(width=width, page=acted))
    found = subprocess.run(
        [
            *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,900"),
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    match = re.search(r'<body data-seen="([^"]*)"', found.stdout)
    assert match is not None, found.stderr
    view, beyond, left, right = match.group(1).split("|")
    lanes = len(tracks_of(answer.timeline))
    assert view == f"250 0 500 {30 * lanes}", "half of the step, around its middle"
    assert beyond == "0"
    assert left != "0 s"
    assert right != left


ANSWER = est.estimate(perceptron([64, 64]), "1x2:m", profile=Machine(devices=2).profile())


@pytest.mark.parametrize(("efficiency_ratio", "is_asked_for"), [(0.8949, True), (0.8951, False)])
def test_a_target_that_the_efficiency_meets_as_printed_is_not_asked_for(
    efficiency_ratio: float, is_asked_for: bool
) -> None:
    scaling = Scaling(
        efficiency_ratio=efficiency_ratio,
        against="1x1:m",
        wanted_ratio=0.9,
        link="the network of 'm'",
        link_bytes_per_s=300e9,
        needed_bytes_per_s=382e9,
    )
    words = dict(answer_facts(ANSWER, scaling=scaling))["scaling"]
    assert words.startswith("89 % of linear" if is_asked_for else "90 % of linear")
    assert ("90 % needs 382 GB/s" in words) == is_asked_for
    assert "300 GB/s" in words


def test_long_names_are_wrapped_and_dollars_are_no_formula() -> None:
    name = "llama,hidden_size=4096,num_hidden_layers=32"
    lines = title_of(f"{name} on 4x8:h100-sxm: peak in update", characters=20).split("\n")
    assert max(map(len, lines)) <= 20
    assert "".join(lines).startswith(name)
    assert title_of("$x$", characters=20) == r"\$x\$"


def test_shades_begin_dark_and_end_at_the_brightest() -> None:
    colormaps = pytest.importorskip("matplotlib").colormaps
    first, second, last = shades(3, brightest=0.8)
    viridis = colormaps["viridis"]
    assert (first, second, last) == (viridis(0.0), viridis(0.4), viridis(0.8))
    assert shades(1, brightest=0.8) == [viridis(0.0)]
