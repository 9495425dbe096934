"""Trainpace."""
