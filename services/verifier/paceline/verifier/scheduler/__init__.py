"""Which drafted nodes a step verifies, and how many nodes clients draft next."""
