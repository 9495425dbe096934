"""The part that runs inside a watched script's processes: standard library and torch only (and the tracer, imported
when a captured model is traced), and never an exception of ours."""
