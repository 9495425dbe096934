"""Fits the constants of the kernel models on measured figures.

Not part of the package: `python -m fitting fit` runs it.
"""
