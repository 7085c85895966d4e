"""What can be seen of Paceline from outside: names of spans and metrics, and how they get out.

Importing it needs nothing but Python: OpenTelemetry and the Prometheus client are imported only
where a process was asked for spans or metrics.
"""
