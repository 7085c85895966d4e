"""The RPCs of the verifier: handlers, messages and errors."""
