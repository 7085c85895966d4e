"""Training of a DSpark drafter (DSpark, sections 3.3 and 5.1)."""
