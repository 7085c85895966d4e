"""Print what pyproject.toml asks for, with the extras named as arguments, one a line.

Images install it before the project itself, so that a change of code installs nothing anew.
"""

import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(extra: str) -> list[str]:
    """Those of an extra, and of the project's other extras that it names."""
    found = []
    for line in project["optional-dependencies"][extra]:
        own = re.fullmatch(r"paceline\[(.+)\]", line)
        found += requirements(own[1]) if own else [line]
    return found


print(*project["dependencies"], *chain.from_iterable(map(requirements, sys.argv[1:])), sep="\n")
