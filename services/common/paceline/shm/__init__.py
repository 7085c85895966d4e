"""What owner and readers of a shared-memory KV segment agree on: names, header, and who lives.

Imports no torch. The verifier makes segments, drafters on the same host read them.
"""

from paceline.shm.header import HEADER_BYTES, TAP_AHEAD, TAP_MARGIN, SegmentHeader
from paceline.shm.names import PREFIX, SHM, segment_path
from paceline.shm.owner import claim, is_orphan

__all__ = [
    "HEADER_BYTES",
    "PREFIX",
    "SHM",
    "TAP_AHEAD",
    "TAP_MARGIN",
    "SegmentHeader",
    "claim",
    "is_orphan",
    "segment_path",
]
