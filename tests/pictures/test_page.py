"""Pages: what others named does not run, Plotly takes each figure, and tables are sorted by numbers."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from lightning_3d.errors import ConfigurationError
from lightning_3d.tools.pictures.kinds import Bars, Cell, Cells, Curves, Lanes, Point, Span
from lightning_3d.tools.pictures.page import Table, TableCell, Words, figure, page, save_page
from lightning_3d.tools.pictures.png import save_png

BAD = "</script><script>alert('$x$')</script><b onclick=x>&"
PICTURES = [
    Bars(
        title=BAD, unit=BAD, labels=(BAD, "two"), parts={BAD: (1.0, None), "other": (2.0, 3.0)}, totals=(BAD, "3"),
        limit=4.0, limit_name=BAD,
    ),
    Bars(title="loss", unit=BAD, labels=("one", "two"), parts={"loss": (3.25, 3.26)}, from_zero=False),
    Curves(
        title=BAD, x=BAD, y=BAD, curves={BAD: (Point(1.0, 2.0, BAD, BAD),)}, deadline=(1.5, BAD), budget=(2.5, BAD)
    ),
    Lanes(title=BAD, unit=BAD, lanes=2, spans=(Span(0, 1, 0, "F", 0.5, BAD), Span(1, 2, 1, "B", 0, BAD))),
    Cells(title=BAD, unit=BAD, rows={BAD: (Cell(1.0, BAD, BAD),), "two": (Cell(0.0, "1", ""), Cell(1.0, "2", ""))}),
]  # fmt: skip
TABLE = Table(title=BAD, header=(BAD, "size"), rows=((TableCell(BAD), TableCell("12 GB", 12e9)),))


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


def test_names_are_text_and_no_part_of_the_page():
    text = page(BAD, [TABLE, Words(title=BAD, lines=(BAD,)), *PICTURES], "/* Plotly */")
    elements = Elements(text)
    scripts = [attributes for tag, attributes in elements.found if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "figures"}, {}, {}]
    assert all("onclick" not in attributes for _, attributes in elements.found)
    assert not any(tag == "b" for tag, _ in elements.found)
    assert elements.texts.count(BAD) == 7  # title, heading, three of the table, two of the words
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1])
    assert len(figures) == len(PICTURES)
    assert not re.search("<(b |script|/script)", json.dumps(figures))  # Plotly reads some HTML in its texts


def test_the_policy_of_a_page_allows_its_own_two_scripts_and_no_network():
    found = [each for tag, each in Elements(page("t", [], "/* Plotly */")).found if "http-equiv" in each]
    policy = found[0]["content"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.count("sha256-") == 2
    assert "http" not in policy


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: type(picture).__name__)
def test_plotly_takes_every_figure(picture):
    figures = pytest.importorskip("plotly.graph_objects")
    drawn = figure(picture)
    figures.Figure(drawn["data"], drawn["layout"])  # raises where a name or a value is none of Plotly's


def test_every_picture_is_drawn_as_png(tmp_path):
    pytest.importorskip("matplotlib")
    save_png(tmp_path / "new" / "all.png", PICTURES)
    save_png(tmp_path / "side.png", PICTURES[:2], side_by_side=True)
    for file in ("new/all.png", "side.png"):
        assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")


def test_a_page_needs_no_other_file(tmp_path):
    pytest.importorskip("plotly")
    text = save_page(tmp_path / "page.html", "title", [TABLE, *PICTURES]).read_text()
    assert "Plotly.newPlot" in text
    assert not any("src" in attributes or "href" in attributes for _, attributes in Elements(text).found)


@pytest.mark.parametrize(
    ("package", "module", "save"),
    [("plotly", "plotly.offline", save_page), ("matplotlib", "matplotlib.figure", save_png)],
)
def test_without_the_extra_an_error_says_how_to_get_it(tmp_path, monkeypatch, package, module, save):
    monkeypatch.setitem(sys.modules, module, None)
    given = (tmp_path / "file", "title", PICTURES) if save is save_page else (tmp_path / "file", PICTURES)
    with pytest.raises(ConfigurationError, match=rf'needs {package}: pip install "lightning-3d\[plots\]"'):
        save(*given)


def test_cells_are_sorted_by_their_numbers():
    cells = [attributes for tag, attributes in Elements(page("t", [TABLE], "")).found if tag == "td"]
    assert cells == [{}, {"class": "number", "data-key": "12000000000.0"}]


def axes_of(monkeypatch, picture, tmp_path):
    """The matplotlib axes on which `picture` is drawn."""
    figure = pytest.importorskip("matplotlib.figure")
    figures = []
    original = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: (figures.append(self), original(self, *a, **k)))
    save_png(tmp_path / "drawn.png", [picture])
    return figures[0].axes[0]


def test_axes_have_complete_numbers_names_and_titles(monkeypatch, tmp_path):
    points = (Point(1.0, 1.5e6, "", "8"), Point(2.0, 3e6, "", "16"))
    axes = axes_of(monkeypatch, Curves(title="Cost", x="days", y="$", curves={"h100": points}), tmp_path)
    assert axes.get_title(loc="left") == "Cost"
    assert "1,000,000" in [label.get_text() for label in axes.get_yticklabels()]
    assert axes.yaxis.get_offset_text().get_text() == ""
    assert axes.get_ylim()[0] == 0


def test_points_of_a_loss_do_not_begin_at_0(monkeypatch, tmp_path):
    axes = axes_of(monkeypatch, PICTURES[1], tmp_path)
    low, high = axes.get_xlim()
    assert 3.2 < low < 3.25 < 3.26 < high < 3.3
    assert not axes.patches


@pytest.mark.parametrize("picture", [PICTURES[0], PICTURES[2], PICTURES[3]], ids=["bars", "curves", "lanes"])
def test_legends_cover_nothing(monkeypatch, tmp_path, picture):
    axes = axes_of(monkeypatch, picture, tmp_path)
    assert axes.get_legend().get_window_extent().x0 > axes.get_window_extent().x1


def test_labels_of_near_points_do_not_cover_each_other(monkeypatch, tmp_path):
    near = (Point(1 + step / 1000, 2.0, "", str(step)) for step in range(50))
    points = (*near, Point(5.0, 2.0, "", "far"))
    axes = axes_of(monkeypatch, Curves(title="t", x="x", y="y", curves={"one": points}), tmp_path)
    assert [text.get_text() for text in axes.texts] == ["0", "far"]
