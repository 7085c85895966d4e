"""The method ``ngram``: prompt lookup."""
