"""Recorded results as one HTML file."""
