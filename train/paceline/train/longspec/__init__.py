"""Training of the LongSpec layer (LongSpec, sections 3.2 and D)."""
