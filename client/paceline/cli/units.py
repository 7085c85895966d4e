"""Numbers with units on the command line."""

import argparse
import re

_FACTORS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def byte_count(text: str) -> int:
    """Parses a size such as `4096`, `512MiB` or `1.5GiB`; an argparse type. Unit: bytes.

    Raises:
        argparse.ArgumentTypeError: The text is not a size, or less than one byte.
    """
    found = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(found[2].lower()) if found else None
    if found is None or factor is None or int(float(found[1]) * factor) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give bytes, or a number with KiB, MiB, GiB or TiB"
        )
    return int(float(found[1]) * factor)
