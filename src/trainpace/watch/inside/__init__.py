"""What runs inside a watched script's own processes. Standard library and torch only (but for
the trace of a captured model, imported when it is needed), and never an exception of ours."""
