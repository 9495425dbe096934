"""Carry a list of changes out one by one, each forecast, measured, and kept only where it helps."""
