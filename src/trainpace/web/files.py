"""The scripts and styles that pages load, read once from the package: a request chooses among these names and opens no file."""

import hashlib
from importlib.resources import files
from typing import NamedTuple

from trainpace.report import SCRIPTS, STYLES, asset

MEDIA_TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


class File(NamedTuple):
    """A file as it is sent."""

    body: bytes
    media_type: str
    etag: str


def _file(name: str, text: str) -> File:
    body = text.encode()
    media_type = MEDIA_TYPES[name.rsplit(".", 1)[1]]
    return File(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


OWN = ("htmx.min.js", "serve.js", "serve.css", "icon.svg")
FILES: dict[str, File] = {
    **{name: _file(name, asset(name)) for name in (*SCRIPTS, *STYLES)},
    **{name: _file(name, (files("trainpace.web") / "static" / name).read_text("utf-8")) for name in OWN},
}
