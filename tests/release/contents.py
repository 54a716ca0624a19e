"""What a wheel and an sdist of optzoo may contain, and must."""

import pathlib
import re
import tarfile
import zipfile

PACKAGE = (
    r"optzoo/(\w+/)*\w+\.py",
    r"optzoo/py\.typed",
    r"optzoo/race/(data|page)/[\w.-]+",  # published runs; what the page of the race shows
)
IN_WHEEL = (*PACKAGE, r"optzoo-[\d.]+\.dist-info/(METADATA|RECORD|WHEEL|entry_points\.txt)")
IN_WHEEL += (r"optzoo-[\d.]+\.dist-info/licenses/LICENSE",)
IN_SDIST = (*PACKAGE, r"(CHANGELOG|README)\.md", "LICENSE", "PKG-INFO", r"pyproject\.toml")
IN_SDIST += (r"\.gitignore",)  # hatchling reads it when it builds the wheel from the sdist
MUST = (
    "optzoo/__init__.py",
    "optzoo/py.typed",
    "optzoo/testing/contract.py",
    "optzoo/race/page/page.html",
)


def members(archive: pathlib.Path) -> dict[str, int]:
    """The files of a wheel or an sdist, by their sizes in bytes."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            return {info.filename: info.file_size for info in file.infolist()}
    with tarfile.open(archive) as file:
        sizes = {info.name: info.size for info in file.getmembers() if info.isfile()}
    return {name.split("/", 1)[1]: size for name, size in sizes.items()}


def check(archive: pathlib.Path) -> str:
    """One line about an archive.

    Raises:
        ValueError: if a file is in it that does not belong there, or if one is missing.
    """
    found = members(archive)
    allowed = re.compile("|".join(IN_WHEEL if archive.suffix == ".whl" else IN_SDIST))
    strange = [name for name in found if not allowed.fullmatch(name)]
    missing = [name for name in MUST if name not in found]
    if strange or missing:
        raise ValueError(f"{archive.name}: does not belong there: {strange}; missing: {missing}")
    packed, unpacked = archive.stat().st_size / 1e3, sum(found.values()) / 1e3
    return f"{archive.name}: {len(found)} files, {packed:.0f} kB, {unpacked:.0f} kB unpacked"
