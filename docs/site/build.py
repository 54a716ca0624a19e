"""Builds the site: ``python docs/site/build.py [--out site]``. A warning is an error."""

import argparse
import pathlib
import runpy
import shutil
import sys

import gallery
import pages
from sphinx.cmd.build import build_main

from optzoo.race import page as race_page

HERE = pathlib.Path(__file__).parent


def main() -> int:
    """Writes the source of the site, then the site; returns the status of Sphinx."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pages.ROOT / "site")
    parser.add_argument("--work", type=pathlib.Path, default=pages.ROOT / "build" / "site")
    arguments = parser.parse_args()
    source, extra = arguments.work / "source", arguments.work / "extra"
    for folder in (source, extra, arguments.out):
        shutil.rmtree(folder, ignore_errors=True)
    source.mkdir(parents=True)
    pages.write(source)
    gallery.write(source, arguments.work / "pictures")
    write_race(extra / "race")
    options = ["-q", "-W", "--keep-going", "-E", "-c", HERE, "-d", arguments.work / "doctrees"]
    options += ["-D", f"html_extra_path={extra}"]
    return build_main([str(o) for o in ["-b", "html", *options, source, arguments.out]])


def write_race(folder: pathlib.Path) -> None:
    """Writes the interactive page of the race from the stored results."""
    stored = runpy.run_path(str(pages.ROOT / "benchmarks" / "race_pictures.py"))["stored"]()
    valley = (pages.ROOT / "docs" / "images" / "valley.png").read_bytes()
    folder.mkdir(parents=True)
    (folder / "index.html").write_text(race_page.write(stored, {"valley.png": valley}))


if __name__ == "__main__":
    sys.exit(main())
