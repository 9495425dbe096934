"""Forecasts against measured runs: read the runs, forecast each under its own conditions, and sum up the errors."""
