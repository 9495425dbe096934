"""The recorder inside a watched script's processes.

It uses only the standard library and torch, and the tracer when a captured model is traced. It
never raises an exception in the script.
"""
