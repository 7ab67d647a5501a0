"""Pages that stand by themselves: of runs, of sweeps, and of whatever is put together from their parts."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from hcsim.cli.app import app
from hcsim.config import CATALOGUE, Wifi, load_scenario, parse_scenario, shipped_scenarios
from hcsim.errors import ConfigError
from hcsim.report.chart import Axis, BarPart, Line, bars, lines
from hcsim.report.home import machines_table, picture
from hcsim.report.page import POLICY, Commands, Facts, Figure, Page, Section, Table, Text, csv_of, html, write_page
from hcsim.twin.prediction import PredictedRun
from hcsim.twin.speedup import speedup

HOSTILE = "</style><script>alert('x')</script>\"' onload=x ]]>\x00\x1b[31m \u202e&amp; javascript:alert(1)"
VOID = {"meta", "line", "rect", "circle", "polyline", "path", "i"}


class Markup(HTMLParser):
    """What a browser would find on a page: its tags and attributes, its text, and whether all that opens closes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not [tag for tag in self._open if tag not in VOID]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def asks_for_nothing(text: str) -> Markup:
    """Return the page's markup, after making sure that a browser would load nothing and run nothing for it."""
    found = Markup(text)
    assert "script" not in found.tags
    assert not {"img", "iframe", "link", "object", "embed", "form", "base"} & set(found.tags)
    assert ("content", POLICY) in found.attributes
    for name, value in found.attributes:
        assert not name.startswith("on"), name
        if name in ("src", "href", "action", "data", "xlink:href"):
            assert value.startswith(("data:text/csv", "#")), value
    style = "".join(re.findall(r"<style.*?</style>", text, re.DOTALL))
    assert "@import" not in style
    assert not re.search(r"url\((?!#)", text)
    return found


def of_all_parts(word: str) -> Page:
    """Return a page that has this word wherever it can be."""
    table = Table((word, word), ((word, word),), left=(word,), title=word)
    axis = Axis(word, lambda value: word)
    drawing = lines(word, [Line(word, ((1.0, 1.0), (2.0, 3.0)))], axis, axis)
    drawing += bars(word, [(word, [BarPart(word, 1.0, "compute", word), BarPart(word, 2.0, "wait", word)])], word)
    parts = (Text(word), table, Figure(word, drawing, table, word, word), Facts(((word, word, word),)),
             Commands((word,), word), Commands((word,), word, folded=True))  # fmt: skip
    return Page(word, word, (Section(word, parts),))


def test_hostile_names_are_text_wherever_they_stand() -> None:
    found = asks_for_nothing(html(of_all_parts(HOSTILE)))
    assert "alert('x')" in found.words
    assert "\x00" not in html(of_all_parts(HOSTILE))
    assert "\x1b" not in html(of_all_parts(HOSTILE))


@given(st.text(max_size=40))
def test_any_text_is_text(word: str) -> None:
    asks_for_nothing(html(of_all_parts(word)))


def test_a_machine_with_a_hostile_name_is_drawn_as_text() -> None:
    scenario = load_scenario("two-macs-wifi")
    machine = replace(CATALOGUE["M4"], name="<b>M4&")  # as a machine that was probed calls itself
    first, *others = scenario.nodes
    found = Markup(picture(replace(scenario, nodes=(replace(first, machine=machine), *others))))
    assert "b" not in found.tags
    assert "<b>M4&" in found.words


@pytest.mark.parametrize("name", shipped_scenarios())
def test_a_picture_of_a_home_has_every_machine_and_every_medium(name: str) -> None:
    scenario = load_scenario(name)
    drawn = Markup(picture(scenario)).words
    for word in (*(node.name for node in scenario.nodes), *(line.home for line in scenario.wan)):
        assert word in drawn
    assert [row[0] for row in machines_table(scenario).rows] == [node.name for node in scenario.nodes]
    assert drawn.count("access point") == 2 * sum(isinstance(medium, Wifi) for medium in scenario.media)


def test_a_home_is_drawn_into_a_file_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "home.svg"
    assert CliRunner().invoke(app, ["show", "mixed-home", "--out", str(file)]).exit_code == 0
    words = {each.text for each in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")}
    assert {"switch", "access point air", "laptop", "16.4 Gb/s / 5.3 Gb/s"} <= words
    refused = CliRunner().invoke(app, ["show", "mixed-home", "--out", str(tmp_path / "home.docx")])
    assert (refused.exit_code, "ends in .svg" in refused.output) == (2, True)


def test_the_numbers_of_a_figure_are_a_file_in_the_page() -> None:
    numbers = Table(("who", "how much"), (("a,b", '1"2'), ("c", "3")))
    text = html(Page("p", sections=(Section("s", (Figure("f", "<svg></svg>", numbers, "n"),)),)))
    links = [value for name, value in Markup(text).attributes if name == "href"]
    assert [unquote(link).partition(",")[2] for link in links] == [csv_of(numbers)]
    assert csv_of(numbers) == 'who,how much\n"a,b","1""2"\nc,3\n'


def test_a_line_goes_where_its_values_are() -> None:
    """Twice the value is twice as far up on a linear axis from zero; what has no place is left out."""
    drawn = lines("t", [Line("a", ((0.0, 0.0), (1.0, 5.0), (2.0, 10.0), (3.0, float("nan"))))], Axis(), Axis())
    (path,) = re.findall(r'points="([^"]*)"', drawn)
    (x0, y0), (x1, y1), (x2, y2) = (map(float, place.split(",")) for place in path.split())
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert lines("t", [Line("a", ((1.0, -1.0),))], Axis(log=True), Axis(log=True)) == ""


def test_bars_are_as_long_as_their_values() -> None:
    drawn = bars("t", [("a", [BarPart("x", 1.0, "compute"), BarPart("y", 3.0, "wait")])], full=8.0)
    one, other = map(float, re.findall(r'<rect [^>]*width="([\d.]+)"', drawn))
    assert other == pytest.approx(3 * one, abs=0.2)
    assert one == pytest.approx(480 / 8, abs=0.2)


def test_what_cannot_be_written_is_an_error_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*p\.html: cannot be written"):
        write_page(tmp_path / "nowhere" / "p.html", Page("p"))


def test_a_cluster_of_one_kind_on_an_ideal_network_is_as_many_times_as_fast() -> None:
    """On ports of 1 Tb/s nothing but the sum of the gradients is left, which the machines' own memory does."""
    scenario = parse_scenario(shipped_scenarios()["four-macs-1gbe"].read_text().replace('"1 Gb/s"', '"1 Tb/s"'), "fast")
    training = scenario.training or load_scenario("four-macs-churn").training
    assert training is not None
    found = speedup(scenario, PredictedRun(replace(training, task="resnet50", strategy="ddp", compressor="none")))
    assert 3.5 < found.times <= 4.0


def test_the_report_of_a_run_is_the_same_twice_and_says_how_to_run_it_again(tmp_path: Path) -> None:
    pages = []
    for name in ("a.html", "b.html"):
        path = tmp_path / name
        words = ["run", "mixed-home", "--task", "digits", "--steps", "4", "--set", "bands=0", "--report", str(path)]
        assert CliRunner().invoke(app, words).exit_code == 0
        pages.append(path.read_bytes())
    assert pages[0] == pages[1]
    found = asks_for_nothing(pages[0].decode())
    assert "hcsim run mixed-home --task digits --steps 4 --set bands=0" in found.words
    for heading in (
        "samples a second", "against the fastest machine alone", "Where the time of a step goes", "What limits it",
        "Loss", "How busy the links are", "Memory", "the scenario as a file",
    ):  # fmt: skip
        assert heading in found.words, heading


def test_a_report_tells_of_faults_in_words(tmp_path: Path) -> None:
    scenario, file = tmp_path / "ill.toml", tmp_path / "r.html"
    hot = '[[fault]]\nkind = "throttle"\nat = "10 ms"\nnode = "mini-2"\nfactor = 0.5\nduration = "20 ms"\n'
    scenario.write_text(shipped_scenarios()["four-macs-1gbe"].read_text() + hot)
    done = CliRunner().invoke(app, ["run", str(scenario), "--task", "digits", "--steps", "8", "--set", "bands=0",
                                    "--report", str(file)])  # fmt: skip
    assert done.exit_code == 0, done.output
    words = asks_for_nothing(file.read_text()).words
    assert "fault: Throttle, node mini-2, factor 0.5, for 0.02 s" in words
    assert "mini-2 is as fast as before" in words


def test_a_report_has_to_have_a_place_before_the_run_begins(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", "two-macs-wifi", "--task", "digits", "--report", str(tmp_path)])
    assert done.exit_code == 2
    assert "give a file in a folder that there is" in done.output
