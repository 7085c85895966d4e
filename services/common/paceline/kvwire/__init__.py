"""Keys and values on the wire, as the verifier writes them and a following drafter reads them."""

from paceline.kvwire.codec import (
    SCALED,
    WIRE_TYPES,
    decode,
    decode_rows,
    encode,
    encode_rows,
    position_bytes,
)

__all__ = [
    "SCALED",
    "WIRE_TYPES",
    "decode",
    "decode_rows",
    "encode",
    "encode_rows",
    "position_bytes",
]
