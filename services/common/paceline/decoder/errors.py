"""Errors of the decoder package."""


class UnsupportedModelError(ValueError):
    """The model folder asks for something this decoder does not do; the message says what."""
