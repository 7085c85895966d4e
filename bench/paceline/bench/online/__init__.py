"""Learning from traffic, shown end to end: a drafter gets better at a package it never saw."""
