"""What runs inside a watched script's own processes. Standard library and torch only, and never an exception of ours."""
