"""The fast operator."""
