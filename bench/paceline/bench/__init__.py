"""Measurements side by side in one run: transformers, Paceline with and without drafters."""
