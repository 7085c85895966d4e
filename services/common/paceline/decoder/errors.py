"""Errors of the decoder package."""


class UnsupportedModelError(ValueError):
    """The model folder needs a feature that this decoder does not support."""
