"""Builds the site: ``python docs/site/build.py [--out site]``. A warning is an error."""

import argparse
import pathlib
import shutil
import sys

import gallery
import pages
from sphinx.cmd.build import build_main

HERE = pathlib.Path(__file__).parent


def main() -> int:
    """Writes the source of the site, then the site; returns the status of Sphinx."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pages.ROOT / "site")
    parser.add_argument("--work", type=pathlib.Path, default=pages.ROOT / "build" / "site")
    arguments = parser.parse_args()
    source = arguments.work / "source"
    for folder in (source, arguments.out):
        shutil.rmtree(folder, ignore_errors=True)
    source.mkdir(parents=True)
    pages.write(source)
    gallery.write(source, arguments.work / "pictures")
    options = ["-q", "-W", "--keep-going", "-E", "-c", HERE, "-d", arguments.work / "doctrees"]
    return build_main([str(o) for o in ["-b", "html", *options, source, arguments.out]])


if __name__ == "__main__":
    sys.exit(main())
