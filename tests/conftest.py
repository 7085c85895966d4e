"""Settings for all tests."""

import os

# Tiny models in many processes: a second thread in each only makes them wait for one another.
# Before anything imports torch, and inherited by every service process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
