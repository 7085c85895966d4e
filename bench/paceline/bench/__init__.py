"""Measurements side by side in one run: transformers, Paceline without and with drafters, replay."""
