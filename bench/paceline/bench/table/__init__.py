"""Decoding speed of every drafter beside transformers, by context length and temperature."""
