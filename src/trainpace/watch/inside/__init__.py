"""Recorder inside the processes of a watched script.

It uses only the standard library and torch. To trace a captured model it also uses trainpace's
tracer. It never raises an exception in the script.
"""
