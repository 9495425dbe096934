"""Output in an encoding that lacks the drawing characters: each becomes one ASCII character, so that columns stay columns."""

import codecs
import sys

_ERRORS = "trainpace"
PLAIN = dict(zip("█▓▒░─│└┤┬├┼●○▲▼·…◀▶×µ–—’²", "##=:-|+++++*o^v.~<>xu--'2", strict=True))


def plain(text: str) -> str:
    """The same number of characters, all of them ASCII."""
    return "".join(c if c.isascii() else PLAIN.get(c, "?") for c in text)


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return plain(error.object[error.start : error.end]), error.end


def never_fail_to_encode() -> None:
    """stdout and stderr write what their encoding has, and ASCII in place of the rest."""
    codecs.register_error(_ERRORS, _replace)
    for stream in (sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None) or ""
        if hasattr(stream, "reconfigure") and not encoding.lower().startswith("utf"):
            stream.reconfigure(errors=_ERRORS)
