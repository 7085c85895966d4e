"""``python -m paceline.kernels`` compiles the CPU kernels, or ends with what is missing."""

import sys

from paceline.kernels import KernelsError, cpu_kernels

try:
    print(cpu_kernels().file)
except KernelsError as error:
    sys.exit(str(error))
