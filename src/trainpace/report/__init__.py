"""Faces: the terminal and one-file HTML. They render records and compute nothing."""
