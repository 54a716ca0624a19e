"""Installation of the packages of an extra, for error messages."""


def how_to_install(extra: str) -> str:
    """The commands that install optzoo with an extra."""
    return f"pip install 'optzoo[{extra}]', or in a checkout pip install -e '.[{extra}]'"
