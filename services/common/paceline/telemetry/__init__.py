"""Spans and metrics: their names, and how they are exported.

OpenTelemetry and the Prometheus client are imported only by a process that exports spans or
metrics.
"""
