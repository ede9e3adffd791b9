"""Pages: what others named does not run, pictures are drawn, and tables are sorted by numbers."""

import sys
from base64 import b64decode
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from lightning_3d.errors import ConfigurationError
from lightning_3d.tools.pictures.drawing import save_png
from lightning_3d.tools.pictures.kinds import Bars, Cell, Cells, Curves, Lanes, Point, Span
from lightning_3d.tools.pictures.page import Table, TableCell, Words, page, save_page

BAD = "</script><script>alert('$x$')</script><b onclick=x>&"
PICTURES = [
    Bars(
        title=BAD, unit=BAD, labels=(BAD, "two"), parts={BAD: (1.0, None), "other": (2.0, 3.0)}, totals=(BAD, "3"),
        limit=4.0, limit_name=BAD,
    ),
    Bars(title="loss", unit=BAD, labels=("one", "two"), parts={"loss": (3.25, 3.26)}, from_zero=False),
    Curves(
        title=BAD, x=BAD, y=BAD, curves={BAD: (Point(1.0, 2.0, BAD),)}, deadline=(1.5, BAD), budget=(2.5, BAD)
    ),
    Lanes(title=BAD, unit=BAD, lanes=2, spans=(Span(0, 1, 0, "F", 0.5), Span(1, 2, 1, "B", 0))),
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
    pytest.importorskip("matplotlib")
    copied = Words(title="to copy", lines=(BAD,), exact=True)
    elements = Elements(page(BAD, [TABLE, Words(title=BAD, lines=(BAD,)), copied, *PICTURES]))
    assert [attributes for tag, attributes in elements.found if tag == "script"] == [{}]
    assert all("onclick" not in attributes for _, attributes in elements.found)
    assert [tag for tag, _ in elements.found if tag in ("b", "pre")] == ["pre"]
    assert elements.texts.count(BAD) == 8  # title, heading, three of the table, two of the words, one to copy
    images = [attributes for tag, attributes in elements.found if tag == "img"]
    assert [image["alt"] for image in images] == [picture.title for picture in PICTURES]
    for image in images:
        drawn = ElementTree.fromstring(b64decode(image["src"].partition("base64,")[2]))
        assert not {"script", "b"} & {part.tag.rpartition("}")[2] for part in drawn.iter()}
        assert BAD.replace("\n", "") in "".join(drawn.itertext())


def test_the_policy_of_a_page_allows_its_own_script_and_no_network():
    found = [each for tag, each in Elements(page("t", [])).found if "http-equiv" in each]
    policy = found[0]["content"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.count("sha256-") == 1
    assert "http" not in policy


def test_every_picture_is_drawn_as_png(tmp_path):
    pytest.importorskip("matplotlib")
    save_png(tmp_path / "new" / "all.png", PICTURES)
    save_png(tmp_path / "side.png", PICTURES[:2], side_by_side=True)
    for file in ("new/all.png", "side.png"):
        assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")


def test_a_page_needs_no_other_file(tmp_path):
    pytest.importorskip("matplotlib")
    text = save_page(tmp_path / "page.html", "title", [TABLE, *PICTURES]).read_text()
    links = [attributes.get("src") or attributes.get("href") for _, attributes in Elements(text).found]
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links if link is not None)


@pytest.mark.parametrize("flag", ["--html", "--plot"])
def test_without_the_extra_an_error_says_how_to_get_it(tmp_path, monkeypatch, flag):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=rf'{flag} needs matplotlib: pip install "lightning-3d\[plots\]"'):
        save_png(tmp_path / "file", PICTURES) if flag == "--plot" else save_page(tmp_path / "file", "title", PICTURES)


def test_cells_are_sorted_by_their_numbers():
    cells = [attributes for tag, attributes in Elements(page("t", [TABLE])).found if tag == "td"]
    assert cells == [{}, {"class": "number", "data-key": "12000000000.0"}]


def axes_of(monkeypatch, picture, tmp_path):
    figure = pytest.importorskip("matplotlib.figure")
    figures = []
    original = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: (figures.append(self), original(self, *a, **k)))
    save_png(tmp_path / "drawn.png", [picture])
    return figures[0].axes[0]


def test_axes_have_complete_numbers_names_and_titles(monkeypatch, tmp_path):
    points = (Point(1.0, 1.5e6, "8"), Point(2.0, 3e6, "16"))
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
    near = (Point(1 + step / 1000, 2.0, str(step)) for step in range(50))
    points = (*near, Point(5.0, 2.0, "far"))
    axes = axes_of(monkeypatch, Curves(title="t", x="x", y="y", curves={"one": points}), tmp_path)
    assert [text.get_text() for text in axes.texts] == ["0", "far"]
