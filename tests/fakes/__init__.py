"""Fakes of what a test needs and does not test: a verifier, a drafter, a transport, an exchange."""
