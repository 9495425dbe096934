"""The dashboard as a program: serves the `ServeRequest` that its starter puts into `REQUEST`, until interrupted."""

from trainpace.verbs.journal import ServeRequest
from trainpace.web.server import serve

if __name__ == "__main__":
    serve(globals().get("REQUEST", ServeRequest()))
