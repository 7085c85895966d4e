"""Many requests at once: throughput, and what each of them gets."""
