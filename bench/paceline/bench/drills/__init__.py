"""What must hold when things break: each drill breaks one thing under load and checks."""
