"""Training of the demo target and of the small language model that drafts for it."""
