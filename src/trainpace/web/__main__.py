"""Entry point of the dashboard. It serves until interrupted.

The starting process sets the global `REQUEST` to a `ServeRequest`.
"""

from trainpace.verbs.journal import ServeRequest
from trainpace.web.server import serve

if __name__ == "__main__":
    serve(globals().get("REQUEST", ServeRequest()))
