"""What the papers measured, an experiment at a time."""
