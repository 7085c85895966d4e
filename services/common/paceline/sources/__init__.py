"""Guesses that need no model of their own, for the verifier and for drafters. Imports no torch."""
