"""BibTeX from the references of docstrings."""

import inspect
import pathlib
import re

import pytest

import optzoo
from optzoo import registry

NAMES = [*optzoo.CATALOG, *optzoo.catalog.WRAPPERS, *optzoo.catalog.DISTRIBUTED]
WRAPPERS = ["slots_dtype", "divide_states", "caught_up"]  # which create has no name for
WITHOUT = {"stacked", "param_groups"}  # which computes what the optimizer inside computes


def entries(text):
    """The key and the fields of each entry."""
    found = []
    for entry in text.split("\n\n"):
        kind, *lines, end = entry.split("\n")
        assert end == "}"
        fields = [re.fullmatch(r"  (\w+) = \{(.+)\},", line) for line in lines]
        kind, key = re.fullmatch(r"@(\w+)\{([a-z0-9-]+),", kind).groups()
        fields = {field[1]: field[2] for field in fields}
        of_venue = {"article": {"journal"}, "inproceedings": {"booktitle"}, "misc": set()}[kind]
        assert fields.keys() & {"journal", "booktitle"} == of_venue
        found.append((key, fields))
    return found


def references(name):
    doc = inspect.getdoc(getattr(optzoo, name) if name in WRAPPERS else registry.factory_of(name))
    return " ".join(doc.partition("References:\n")[2].partition("\n\n")[0].split())


@pytest.mark.parametrize("name", [name for name in [*NAMES, *WRAPPERS] if name not in WITHOUT])
def test_every_work_of_a_docstring_is_cited(name):
    found = entries(optzoo.cite(name))
    text = references(name)
    assert [fields["url"] for _, fields in found] == re.findall(r"<(https?://[^>]+)>`_", text)
    assert len({key for key, _ in found}) == len(found)
    # A paper has authors, a title and a year, or else the docstring is not in the format.
    papers = [fields for _, fields in found if "year" in fields]
    assert len(papers) == len(re.findall(r"`_, \d{4}", text))
    assert all(fields["author"] and fields["title"][0] == "{" for fields in papers)
    assert len(papers) == sum("author" in fields for _, fields in found)
    for _, fields in found:
        assert all(value.count("{") == value.count("}") for value in fields.values())


def test_fields():
    ((key, fields),) = entries(optzoo.cite("lazy_adam"))
    assert key == "kingma2015adam"
    assert fields["author"] == "Diederik P. Kingma and Jimmy Ba" and fields["year"] == "2015"
    assert fields["booktitle"] == "3rd International Conference on Learning Representations"
    assert fields["eprint"] == "1412.6980"
    both = entries(optzoo.cite("momentum"))
    assert [key for key, _ in both] == ["polyak1964methods", "sutskever2013importance"]
    assert both[0][1]["doi"] == "10.1016/0041-5553(64)90137-5"
    assert [both[0][1][name] for name in ("volume", "number", "pages")] == ["4", "5", "1--17"]
    assert both[1][1]["author"] == (
        "Ilya Sutskever and James Martens and George Dahl and Geoffrey Hinton"
    )
    software, paper = entries(optzoo.cite("normalized_sgd"))
    assert software[0] == "returnn" and software[1]["note"] == "returnn.tf.updater"
    assert paper[0] == "cortes2006finite" and paper[1]["author"] == "Jorge Cortés"
    assert paper[1]["journal"] == "Automatica"


@pytest.mark.parametrize("name", [name for name in [*NAMES, *WRAPPERS] if name not in WITHOUT])
def test_all_authors_are_named(name):
    """As many as the docstring has, of whom the first are the same; of "et al." three or more."""
    cited = {fields["url"]: fields for _, fields in entries(optzoo.cite(name))}
    pattern = r"([\w-]+)( et al\.| and [\w-]+|), `[^<]+<(http[^>]+)>`_, (\d{4})"
    works = re.findall(pattern, references(name))
    assert len(works) == sum("year" in fields for fields in cited.values())
    for first, others, url, year in works:
        authors = cited[url]["author"].replace("{", "").replace("}", "").split(" and ")
        last = [name.split()[-1] for name in authors]
        assert last[0] == first and "others" not in last and cited[url]["year"] == year
        if others == " et al.":
            assert len(last) > 2
        else:
            assert last[1:] == others.removeprefix(" and ").split()


def test_the_library_itself():
    """As in CITATION.cff."""
    ((key, fields),) = entries(optzoo.cite())
    assert key == "optzoo" and optzoo.cite("optzoo") == optzoo.cite()
    text = (pathlib.Path(__file__).parents[1] / "CITATION.cff").read_text()
    assert f'name: "{fields["author"][1:-1]}"' in text and fields["title"] == "{optzoo}"
    assert fields["note"] == f"Version {optzoo.__version__}"


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("tf.train.FtrlOptimizer", "ftrl"),
        ("Adam", "adam"),
        ("ElasticAverageOptimizer", "elastic_average"),
    ],
)
def test_names_are_those_of_create(name, same):
    assert optzoo.cite(name) == optzoo.cite(same)


def test_names_of_fbgemm_are_known():
    ((key, _),) = entries(optzoo.cite("EmbOptimType.ADAM"))
    assert key == "fbgemm"


def test_unknown_names_get_the_nearest_ones():
    with pytest.raises(ValueError) as of_create:
        optzoo.create("adamm", learning_rate=0.1)
    with pytest.raises(ValueError, match="nearest are") as of_cite:
        optzoo.cite("adamm")
    assert str(of_cite.value) == str(of_create.value)
    with pytest.raises(TypeError, match="must be a string, got 3"):
        optzoo.cite(3)


def test_citation_file_has_the_version():
    text = (pathlib.Path(__file__).parents[1] / "CITATION.cff").read_text()
    assert f"\nversion: {optzoo.__version__}\n" in text


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_without_a_reference(name):
    with pytest.raises(ValueError, match=f"'{name}' has no reference"):
        optzoo.cite(name)
