"""Fault injection under load: each drill injects one fault and checks what must hold."""
