"""The page of the race in Chromium: hover, isolation, families, axes; on a desktop and a phone.

``tests/browsers.py`` says what it needs; test_page.py checks data and structure without a browser.
"""

import json
import os
import pathlib
import time

import pytest

from optzoo.race import page

from .. import browsers  # before selenium: it skips where there is none
from .test_pictures import PICTURES

# isort: split
from selenium.webdriver.common.actions import interaction
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.pointer_input import PointerInput
from selenium.webdriver.support.ui import WebDriverWait

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "index.html"
    file.write_text(page.write(PICTURES["stored"](), {}))
    return file.as_uri()


@pytest.fixture(scope="module", params=browsers.SIZES)
def opened(request, address):
    """A browser with the page. With SCREENSHOTS=folder the tests leave pictures there."""
    with browsers.opened(request.param) as browser:
        browser.get(address)
        yield Opened(browser, request.param)


class Opened:
    """A page in a browser, and what one does with it."""

    def __init__(self, browser, name):
        self.browser, self.name = browser, name
        self.run = browser.execute_script

    def plot(self, name):
        """Scrolls to a plot, and waits until it is drawn."""
        self.run(f"document.getElementById('{name}').scrollIntoView({{block: 'center'}})")
        div = f"document.getElementById('{name}')"
        self.until(f"return {div}._fullLayout !== undefined && !stale.has({div})")

    def until(self, code):
        WebDriverWait(self.browser, 30, 0.1).until(lambda _: self.run(code))

    def press(self, selector):
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def traces(self, name):
        """Names and opacities of the lines of a plot."""
        return self.run(
            f"return document.getElementById('{name}').data.filter(t => t.name)"
            ".map(t => [t.name, t.opacity, t.meta])"
        )

    def at_point(self, name, trace, point):
        """The place of a point in the window."""
        return self.run(
            f"const div = document.getElementById('{name}'), plan = div._fullLayout;"
            "const box = div.querySelector('.nsewdrag').getBoundingClientRect();"
            f"const t = div.data.find(t => t.name === {json.dumps(trace)});"
            f"return [box.left + plan.xaxis.d2p(t.x[{point}]),"
            f" box.top + plan.yaxis.d2p(t.y[{point}])]"
        )

    def point_to(self, name, trace, point, *, click=False):
        """Moves the mouse to a point of a line; on the phone a finger taps there."""
        is_phone = self.name == "phone"
        kind = interaction.POINTER_TOUCH if is_phone else interaction.POINTER_MOUSE
        actions = ActionBuilder(self.browser, mouse=PointerInput(kind, kind))
        before = None
        while (place := self.at_point(name, trace, point)) != before:  # until the page rests
            before = place
            time.sleep(0.4)  # and not as the second half of a double click
        x, y = map(round, place)
        if not is_phone:
            actions.pointer_action.move_to_location(x - 3, y)
        actions.pointer_action.move_to_location(x, y)
        if click or is_phone:
            actions.pointer_action.click()
        actions.perform()

    def shot(self, what):
        if folder := os.environ.get("SCREENSHOTS"):
            path = pathlib.Path(folder) / f"{self.name}_{what}.png"
            self.browser.save_screenshot(str(path))


@pytest.fixture(autouse=True)
def at_the_beginning(opened):
    opened.press("[data-all=on]")
    opened.press("[data-axis=steps]")
    if opened.run("return !state.y"):
        opened.press("[data-log=y]")


def lowest(opened, name):
    """The line that is lowest at its end, which no other line hides, and a point near its end."""
    return opened.run(
        f"const lines = document.getElementById('{name}').data.filter(t => t.name);"
        "const last = t => t.y[t.y.length - 1] ?? Infinity;"
        "const t = lines.reduce((a, b) => (last(b) < last(a) ? b : a));"
        "return [t.name, t.y.length - 2]"  # the last one is at the edge of the plot
    )


def test_opens_without_a_network(opened):
    for kind in ("ranks", "profile", "loss-0", "rates-0", "target-0"):
        opened.plot(kind)
        opened.shot(kind)
    assert opened.run("return performance.getEntriesByType('resource').length") == 0
    assert opened.browser.get_log("browser") == []
    assert opened.run("return document.documentElement.scrollWidth <= innerWidth")


def test_hover_names_the_line(opened):
    opened.plot("loss-0")
    name, last = lowest(opened, "loss-0")
    opened.point_to("loss-0", name, last)
    opened.until("return document.querySelector('#loss-0 .hovertext') !== null")
    assert name in opened.run("return document.querySelector('#loss-0 .hovertext').textContent")
    opened.shot("hover")


def test_click_isolates_in_all_plots(opened):
    opened.plot("rates-0")
    opened.plot("loss-0")
    name, last = lowest(opened, "loss-0")
    opened.point_to("loss-0", name, last, click=True)
    opened.until("return state.isolated !== null")
    names = opened.run("return state.isolated")
    assert " = ".join(names) == name
    shown = opened.run("return document.getElementById('isolated').textContent")
    assert shown == f"\u00d7 {name}"
    for plot in ("loss-0", "rates-0"):
        opened.plot(plot)
        opened.until(f"return !stale.has(document.getElementById('{plot}'))")
        bright = [meta for _, opacity, meta in opened.traces(plot) if opacity == 1]
        assert bright == [names] and len(opened.traces(plot)) > 10
        opened.shot(f"isolated_{plot}")
    opened.press("#isolated")
    assert opened.run("return state.isolated === null")
    assert all(opacity == 1 for _, opacity, _ in opened.traces("rates-0"))


def test_an_address_isolates_an_optimizer(opened):
    opened.run("location.hash = 'rmsprop'")
    opened.until("return String(state.isolated) === 'rmsprop'")
    opened.plot("loss-0")
    opened.until("return !stale.has(document.getElementById('loss-0'))")
    bright = [meta for _, opacity, meta in opened.traces("loss-0") if opacity == 1]
    assert len(bright) == 1 and "rmsprop" in bright[0]
    opened.run("location.hash = 'nothing'")
    opened.press("#isolated")
    assert opened.run("return state.isolated === null")


def touching(opened, selector):
    """The texts of elements less than 5 pixels beside another one, or cut by the window."""
    return opened.run(
        f"const found = [...document.querySelectorAll({json.dumps(selector)})]"
        ".map(e => [e.textContent, e.getBoundingClientRect()]).filter(([, a]) => a.width);"
        "return found.filter(([, a], i) => a.left < 0 || a.right > innerWidth || found.some("
        "([, b], j) => i !== j && a.left < b.right + 5 && b.left < a.right + 5"
        " && a.top < b.bottom && b.top < a.bottom)).map(([text]) => text)"
    )


@pytest.mark.parametrize("plot", ["loss-0", "profile"])
def test_a_legend_names_each_line(opened, plot):
    opened.plot(plot)
    opened.run(f"document.querySelector('#{plot} + .legend').scrollIntoView({{block: 'end'}})")
    opened.shot(f"legend_{plot}")
    assert touching(opened, f"#{plot} + .legend button") == []
    legend = opened.run(
        f"return [...document.querySelectorAll('#{plot} + .legend button')].map(e => ["
        "e.textContent, e.querySelector('line').getAttribute('stroke'),"
        "e.querySelector('line').getAttribute('stroke-dasharray').replace('none', 'solid')])"
    )
    lines = opened.run(
        f"return document.getElementById('{plot}').data.filter(t => t.name)"
        ".map(t => [t.name, t.line.color, t.line.dash])"
    )
    assert legend == lines[::-1] and len(lines) > 30  # the best one is drawn last: above the others
    assert len({(colour, dash) for _, colour, dash in lines}) == len(lines)
    # A click isolates the line, here and in the others.
    opened.press(f"#{plot} + .legend button:nth-child(3)")
    assert " = ".join(opened.run("return state.isolated")) == legend[2][0]
    dim = opened.run(
        f"return [...document.querySelectorAll('#{plot} + .legend button')]"
        ".map(e => e.classList.contains('dim'))"
    )
    assert dim.count(False) == 1 and not dim[2]


def test_the_best_line_is_first(opened):
    """So that it is above the others, in every figure."""
    for problem in opened.run("return DATA.problems"):
        losses = [line["mean"][-1] for line in problem["lines"] if not line["diverged"]]
        assert losses == sorted(losses)


@pytest.mark.parametrize("axis", ["steps", "seconds"])
def test_labels_of_axes_do_not_touch(opened, axis):
    opened.press(f"[data-axis={axis}]")
    problems = range(opened.run("return DATA.problems.length"))
    names = [f"{kind}-{i}" for kind in ("loss", "rates", "target") for i in problems]
    for plot in ["ranks", "profile", *names]:
        if not opened.run(f"return document.getElementById('{plot}')"):
            continue
        opened.plot(plot)
        ticks = [f"document.querySelectorAll('#{plot} .{a}tick text').length" for a in "xy"]
        opened.until(f"return Math.min({', '.join(ticks)}) > 1")
        for of_axis in ("xtick", "ytick"):
            assert touching(opened, f"#{plot} .{of_axis} text") == [], (plot, of_axis)
        texts = opened.run(
            f"return [...document.querySelectorAll('#{plot} .ytick text')].map(e => e.textContent)"
        )
        assert not [text for text in texts if "…" in text]


@pytest.mark.parametrize("name", ["soap", "global_decay_row_wise_adagrad"])
def test_the_isolated_optimizer_can_be_read(opened, name):
    opened.run(f"location.hash = '{name}'")
    opened.until(f"return String(state.isolated) === '{name}'")
    button = "document.getElementById('isolated')"
    assert opened.run(f"return {button}.scrollWidth <= {button}.clientWidth"), name
    opened.run("location.hash = ''")


def test_a_family_is_switched_off_and_on(opened):
    opened.plot("loss-0")
    before = opened.traces("loss-0")
    adam = "#families [data-name=Adam]"
    opened.press(adam)
    assert opened.run(f"return document.querySelector('{adam}').ariaPressed") == "false"
    after = opened.traces("loss-0")
    family = opened.run("return [...family].filter(([, f]) => f === 'Adam').map(([n]) => n)")
    assert 0 < len(after) < len(before)
    assert not [meta for _, _, meta in after if set(meta) <= set(family)]
    opened.shot("without_adam")
    opened.press("#optimizers [data-name=adam]")
    assert any("adam" in meta for _, _, meta in opened.traces("loss-0"))
    opened.press("#optimizers [data-name=adam]")
    opened.press(adam)
    assert opened.traces("loss-0") == before
    opened.press("[data-all=off]")
    assert opened.traces("loss-0") == []


def test_steps_and_time_linear_and_log_axes(opened):
    opened.plot("loss-0")
    plan = "return document.getElementById('loss-0')._fullLayout"
    first = "const t = document.getElementById('loss-0').data.find(t => t.name); return "
    assert opened.run(f"{plan}.xaxis.title.text") == "step"
    assert opened.run(f"{plan}.yaxis.type") == "log"
    name, steps = opened.run(first + "[t.name, t.x]")
    opened.press("[data-axis=seconds]")
    assert opened.run(f"{plan}.xaxis.title.text") == "seconds"
    assert opened.run(f"{plan}.xaxis.type") == "log"
    [second] = opened.run(
        f"return DATA.problems[0].lines.filter(l => l.names.join(' = ') === {json.dumps(name)})"
        ".map(l => l.seconds)"
    )
    assert opened.run(first + "t.x") == pytest.approx([step * second for step in steps])
    opened.shot("time")
    opened.press("[data-log=x]")
    opened.press("[data-log=y]")
    assert opened.run(f"{plan}.xaxis.type") == opened.run(f"{plan}.yaxis.type") == "linear"
    opened.shot("linear")


def test_the_table_is_sorted_by_a_click(opened):
    opened.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    cells = "return [...document.querySelectorAll('tbody')][0].rows[0].cells[0].textContent"
    assert opened.run(cells) == "1"
    opened.press("thead th:nth-child(1) button")
    opened.press("thead th:nth-child(1) button")
    assert opened.run(cells) != "1"
    assert opened.run("return document.documentElement.scrollWidth <= innerWidth")
    opened.shot("table")
    opened.run("document.querySelectorAll('details').forEach(d => { d.open = false })")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system(opened, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    opened.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    opened.plot("loss-0")
    text = {"light": "#1c2024", "dark": "#e6e9ed"}[scheme]
    opened.until(f"return document.getElementById('loss-0').layout.font.color === '{text}'")
    opened.shot(scheme)
    opened.run("scrollTo(0, 0)")
    opened.shot(f"top_{scheme}")
