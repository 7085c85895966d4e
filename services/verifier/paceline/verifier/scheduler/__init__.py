"""Which drafted nodes get a place in the next step, and how many the next trees may have."""
