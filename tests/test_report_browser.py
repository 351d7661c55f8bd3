"""The report's page in a real browser: it draws what it says, asks nobody for anything, and suits any screen."""

import json

import pytest

from cascade.cli import main
from cascade.report import palette
from tests.chromium import Browser, find
from tests.records import bench
from tests.test_report import evil

pytestmark = pytest.mark.slow

CATEGORIES = ("code", "edit", "extraction", "summarization", "question-answering", "math_reasoning", "writing",
              "multi-turn conversation", "translation", "rag", "stem", "humanities", "roleplay", "chat")  # fmt: skip
SYSTEMS = ("cascade", "plain", "hf-plain", "hf-pld", "hf-assisted", "hf-nested")
SCREENS = {
    "desktop, light": {"width": 1280, "height": 900},
    "desktop, dark": {"width": 1280, "height": 900, "dark": True},
    "phone, light": {"width": 390, "height": 844, "phone": True},
    "phone, dark": {"width": 390, "height": 844, "phone": True, "dark": True},
}
each_screen = pytest.mark.parametrize("screen", SCREENS.values(), ids=SCREENS.keys())

# Pairs of labels of one axis that touch, and labels that the picture's edge cuts.
CLASHES = """[...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => {
  const edge = plot.getBoundingClientRect();
  const cut = [...plot.querySelectorAll('text')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.width && (box.left < edge.left - 1 || box.right > edge.right + 1 || box.bottom > edge.bottom + 1);
  }).map(text => `${plot.id}: ${text.textContent} is cut`);
  const touching = ['.xtick', '.ytick'].flatMap(kind => {
    const texts = [...plot.querySelectorAll(`${kind} text`)];
    const boxes = texts.map(text => [text.textContent, text.getBoundingClientRect()]);
    const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    return boxes.flatMap(([one, a], i) =>
      boxes.slice(i + 1).filter(([, b]) => meet(a, b)).map(([other]) => `${one} / ${other}`));
  });
  return [...cut, ...touching];
})"""

# Text smaller than 12 pixels.
SMALL = """[...document.querySelectorAll('body *')].filter(element =>
  [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()) && element.getClientRects().length &&
  !['SCRIPT', 'STYLE'].includes(element.tagName) && parseFloat(getComputedStyle(element).fontSize) < 12
).map(element => element.textContent)"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find()
    if program is None:
        pytest.skip("no Chromium is installed here: apt-get install chromium")
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def written(folder, record):
    (folder / "out.json").write_text(json.dumps(record))
    assert main(["report", str(folder / "out.json"), "--html", str(folder / "out.html")]) == 0
    return folder / "out.html"


@pytest.fixture(scope="module")
def record():
    return bench(CATEGORIES, SYSTEMS, tokens=120)


@pytest.fixture(scope="module")
def page(tmp_path_factory, record):
    return written(tmp_path_factory.mktemp("page"), record)


def marks(browser, chart, trace):
    """What a trace's marks in the picture stand for, by where they are: values on the x axis."""
    return browser.run(f"""(() => {{
      const plot = document.getElementById('{chart}'), axis = plot._fullLayout.xaxis;
      return [...plot.querySelectorAll('.scatterlayer .trace')[{trace}].querySelectorAll('.point')].map(point =>
        axis.p2c(point.transform.baseVal.getItem(0).matrix.e));
    }})()""")


@each_screen
def test_charts_are_drawn_with_the_files_values(browser, page, record, screen):
    browser.open(page, **screen)
    for i, system in enumerate(system for system in SYSTEMS if system != "plain"):
        figures = record["summary"][system]
        assert marks(browser, "chart-speedup", i) == pytest.approx(
            [figures[name]["speedup"] for name in ("overall", *CATEGORIES)], abs=0.01
        )
    assert browser.run("document.querySelectorAll('#chart-speedup path.xerror').length") == 5 * (len(CATEGORIES) + 1)
    for i in (0, 1):
        figures = record["summary"]["cascade"]
        alphas = [figures[name]["levels"][i]["alpha"] for name in ("overall", *CATEGORIES)]
        assert marks(browser, "chart-alpha", i) == pytest.approx(alphas, abs=0.01)
        assert marks(browser, "chart-positions", i) == pytest.approx(range(1, 7), abs=0.05)
    assert browser.run("document.querySelectorAll('#chart-time .barlayer .point').length") == 5 * (len(CATEGORIES) + 1)
    assert browser.run("document.querySelectorAll('#timeline .barlayer .point').length") > 20


@each_screen
def test_nothing_goes_wrong_and_nobody_is_asked(browser, page, screen):
    browser.open(page, **screen)
    assert browser.problems == []
    assert browser.requests == [page.as_uri()]


@each_screen
def test_everything_fits_and_can_be_read(browser, page, screen):
    browser.open(page, **screen)
    assert browser.run("document.documentElement.scrollWidth") == screen["width"]
    assert browser.run(CLASHES) == []
    assert browser.run(SMALL) == []


def test_the_theme_can_change_while_the_page_is_open(browser, page):
    browser.open(page, 1280, 900)

    def colours():
        mark = "document.querySelector('#chart-speedup .scatterlayer .trace:last-child .point').style.fill"
        return browser.run(f"[{mark}, getComputedStyle(document.body).backgroundColor]")

    def rgb(colour):
        return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"

    ours = [[rgb(palette.SYSTEMS[4][side]), rgb(palette.PAGE["page"][side])] for side in (0, 1)]
    assert colours() == ours[0]
    for dark in (True, False):
        browser.theme(dark)
        browser.wait(
            f"document.querySelector('#chart-speedup .trace:last-child .point').style.fill === '{ours[dark][0]}'"
        )
        assert colours() == ours[dark]


def test_a_request_can_be_followed(browser, page, record):
    browser.open(page, 1280, 900)
    own = [run for run in record["runs"] if run["rounds"]]
    text = "document.getElementById('text').textContent"
    assert browser.run(text) == own[0]["text"]
    browser.run("choose.selectedIndex = 3; choose.dispatchEvent(new Event('change'))")
    assert browser.run(text) == own[3]["text"]
    assert browser.run("document.querySelectorAll('#text .token').length") == len(own[3]["tokens"])
    count = own[3]["origins"].count(1)
    share = round(100 * count / len(own[3]["origins"]))
    assert browser.run("legend.children[1].textContent") == f"draft {count} ({share} %)"
    drawn = browser.run(
        "timeline.data.filter(trace => trace.name === 'K').map(trace => trace.y.filter(k => k !== null).length)"
    )
    assert all(steps > 5 for steps in drawn)


def test_a_token_says_where_it_comes_from(browser, page, record):
    browser.open(page, 1280, 900)
    run = next(run for run in record["runs"] if run["rounds"])
    index = next(i for i, origin in enumerate(run["origins"]) if origin == 0)
    ends, one = 0, None
    for one in run["rounds"]:
        ends += len(one["tokens"])
        if index < ends:
            break
    level, piece = one["levels"][0], json.dumps(run["pieces"][index], ensure_ascii=False)
    said = [
        f"Token {index + 1}, id {run['tokens'][index]} {piece}: first proposed by ngram",
        f"Round {one['round']}: {len(one['tokens'])} tokens in {1000 * one['seconds']:.1f} ms",
        f"ngram: K {level['k']}, {level['drafted']} drafted, {level['tested']} tested, {level['accepted']} accepted",
    ]
    detail = "detail.textContent.split('\\n').slice(0, 3)"
    x, y = browser.run(f"""(() => {{
      document.getElementById('text').scrollIntoView();
      const box = document.querySelectorAll('#text .token')[{index}].getClientRects()[0];
      return [box.left + box.width / 2, box.top + box.height / 2];
    }})()""")
    browser.point(x, y)
    assert [line.split(" (")[0] for line in browser.run(detail)] == said
    browser.run("document.getElementById('text').focus()")
    browser.press("ArrowRight")
    assert browser.run(detail)[0].startswith(f"Token {index + 2}, ")
    browser.press("ArrowLeft")
    assert browser.run(detail)[0].startswith(f"Token {index + 1}, ")
    browser.press("End")
    assert browser.run(detail)[0].startswith(f"Token {len(run['tokens'])}, ")


def test_markup_in_the_file_does_nothing(browser, tmp_path):
    page = written(tmp_path, evil())
    browser.open(page, 390, 844, phone=True)
    assert browser.run("window.pwned === undefined && document.images.length === 0")
    assert browser.problems == []
    assert browser.requests == [page.as_uri()]
    assert browser.run("document.documentElement.scrollWidth") == 390
    assert "onerror" in browser.run("document.getElementById('text').textContent")
