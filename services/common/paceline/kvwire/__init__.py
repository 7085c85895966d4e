"""Keys and values on the wire, as the verifier writes them and a following drafter reads them."""

from paceline.kvwire.codec import SCALED, WIRE_TYPES, decode, encode, position_bytes

__all__ = ["SCALED", "WIRE_TYPES", "decode", "encode", "position_bytes"]
