"""Figures in README and docs, written from the recorded results and held to them."""
