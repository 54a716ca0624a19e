"""The site is built without a warning, and the check finds nothing, or what was broken."""

import pathlib
import runpy
import subprocess
import sys

import pytest

TOOLS = pathlib.Path(__file__).parents[1] / "docs" / "site"
pytestmark = pytest.mark.full


def run(tool, *arguments):
    command = [sys.executable, str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built once."""
    folder = tmp_path_factory.mktemp("site")
    work = TOOLS.parents[1] / "build" / "site"  # the pictures are kept there
    done = run("build.py", "--out", folder / "built", "--work", work)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    return folder / "built"


@pytest.fixture(scope="module")
def check():
    """The functions of check.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        return runpy.run_path(str(TOOLS / "check.py"))


def test_nothing_is_broken(site):
    done = run("check.py", "--site", site)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.endswith(" 0 failures\n")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ('<a href="no_such_page.html">x</a>', "no_such_page.html does not exist"),
        ('<a href="gallery.html#nowhere">x</a>', "gallery.html#nowhere has no such anchor"),
        ('<script src="https://cdn.example.org/x.js"></script>', "is loaded from elsewhere"),
        ('<p style="background: url(//example.org/x.png)">x</p>', "is loaded from elsewhere"),
    ],
)
def test_a_broken_page_is_found(site, check, change, found):
    text = {name: (site / name).read_text() for name in ("index.html", "gallery.html")}
    text["index.html"] = text["index.html"].replace("</article>", f"{change}</article>")
    pages = {name: check["Page"](content) for name, content in text.items()}
    (failure,) = check["check_links"](site, pages)
    assert failure.page == "index.html"
    assert f"{failure.link} {failure.why}".endswith(found)


def test_pale_code_is_found(check, tmp_path):
    css = """.highlight { background: #f0f0f0; } /* a { color: #fff } */
    .highlight .c { color: #60A0B0; font-style: italic } .highlight .k { color: #007020 }
    @media not print { body[data-theme="dark"] .highlight { background: #222; color: #eee }
    body[data-theme="dark"] .highlight .c { color: #555 } }"""
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "pygments.css").write_text(css)
    found = [(f.link, f.why) for f in check["check_contrast"](tmp_path)]
    assert found == [
        (".highlight .c", "has 2.6 to 1 on #f0f0f0"),
        ('body[data-theme="dark"] .highlight .c', "has 2.1 to 1 on #222"),
    ]


# Elements that end beside the window and are in nothing that scrolls, but the whole page.
WIDE = """
const scrolls = e => e.tagName !== "ARTICLE" && e.tagName !== "MAIN" && (
  ["auto", "scroll"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
const root = document.documentElement;
return [...document.querySelectorAll("article *, main *")]
  .filter(e => e.getBoundingClientRect().right > root.clientWidth + 1 && !scrolls(e))
  .map(e => `${e.tagName} ${e.textContent.slice(0, 40)}`)
  .concat(root.scrollWidth > root.clientWidth ? ["the page"] : []);
"""


def test_search_finds_the_task_first(site):
    from .browsers import WebDriverWait, opened

    tasks = {
        "embedding": "train_embeddings",
        "out of memory": "little_memory",
        "NaN": "training_diverges",
        "resume": "resume_tf1",
        "muon": "optzoo.muon",
    }
    first = "return document.querySelector('#search-results li a')?.href"
    with opened("desktop") as browser:
        for words, page in tasks.items():
            browser.get(f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}")
            found = WebDriverWait(browser, 30, 0.1).until(lambda _: browser.execute_script(first))
            assert f"/{page}.html" in found, words


def test_nothing_is_cut_on_a_phone(site):
    from .browsers import opened

    folders = {site.name, "docs", "tasks", "colabs", "race"}
    chosen = [
        p
        for p in sorted(site.rglob("*.html"))
        if p.parent.name in folders or p.stem.startswith("group-") or p.stem.endswith("adam")
    ]
    assert len(chosen) > 60
    with opened("phone") as browser:
        wide = {}
        for page in chosen:
            browser.get(page.as_uri())
            if found := browser.execute_script(WIDE):
                wide[page.name] = found[:3]
        assert wide == {}


def test_names_without_a_page_are_found_and_the_check_fails(tmp_path):
    (tmp_path / "index.html").write_text('<a href="gone.html">x</a>')
    (tmp_path / "searchindex.js").write_text(
        'Search.setIndex({"docnames":["index"],"terms":{},"titleterms":{}})'
    )
    done = run("check.py", "--site", tmp_path)
    assert done.returncode == 1
    assert "index.html: gone.html does not exist\n" in done.stdout
    assert "api/optzoo.ftrl.html: optzoo.ftrl this public name has no page\n" in done.stdout
    assert "search.html: AdamOptimizer finds [], but not api/optzoo.adam\n" in done.stdout
    assert "search.html: summaries are read by a request, which fails from disk\n" in done.stdout
