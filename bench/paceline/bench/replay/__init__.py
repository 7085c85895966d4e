"""Traces of rounds, and the scheduler's rules judged on them offline."""
