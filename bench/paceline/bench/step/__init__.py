"""Time of a decoder step beside its roofline and beside other engines."""
