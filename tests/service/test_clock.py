"""What a service waits for is measured by a clock that nobody sets."""

import re
from pathlib import Path

SERVICES = Path(__file__).parents[2] / "services"
WALL = re.compile(r"\btime\.time\(|datetime\.(now|utcnow|today)\(|\btime\.localtime\(")


def test_no_lease_and_no_timeout_depends_on_the_time_of_day() -> None:
    """A jump of the clock would end them all at once, or never."""
    files = [*SERVICES.rglob("*.py")]
    found = [str(file) for file in files if WALL.search(file.read_text(encoding="utf-8"))]
    assert len(files) > 100
    assert not found
