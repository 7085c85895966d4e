"""Time of a decoder step, beside other engines."""
