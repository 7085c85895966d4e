"""Training drafters further, on texts that a drafter service recorded."""
