"""Names of persons and machines removed from records, because journals are made to be shared.

Paths shrink to their last component; home folders, user names, host names, addresses, secrets in commands and serial
numbers of devices are removed. A folder with a space in its name is recognised only inside quotes. Public model names
(``timm:resnet50``) stay.
"""

import contextlib
import functools
import getpass
import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from trainpace.journal.entry import Entry, is_text, printable

MEASURED_BY = "TRAINPACE_MEASURED_BY"
"""The variable with a name for the journal that a team shares: a person's, a group's, a machine's. Nothing is kept without it."""
LONGEST_NAME = 80
_NOBODY = {
    "root",
    "user",
    "users",
    "home",
    "host",
    "localhost",
    "admin",
    "ubuntu",
    "debian",
    "runner",
    "nobody",
    "me",
}
"""Names that identify nobody; removing them would only spoil sentences."""

ROUNDS = 10
_IDENTIFYING_KEYS = re.compile(
    r"(^|[_.\-])(host|hostname|nodename|node|nodelist|user|username|logname|login|home|cwd|pwd|path|dir|email|mail|ip|addr|address|mac"
    r"|serial|uuid|token|secret|password|passwd|key)s?$",
    re.IGNORECASE,
)
_SECRET = re.compile(
    r"(?<![\w-])(?P<name>[\w-]*(?:token|api[-_]?key|secret|passw(?:or)?d)[\w-]*)(?P<equals>\s*[=:]\s*|\s+)(?P<value>(?:\"[^\"]*\"|'[^']*')\S*|[^\s-]\S*)",
    re.IGNORECASE,
)
_HOST_OPTION = re.compile(
    r"(?P<name>(?<![\w-])--?[\w-]*(?:addr|address|endpoint|host|hostname|nodelist|server)|\b(?:MASTER_ADDR|HOSTNAME))"
    r"(?P<equals>=|\s+)(?P<value>[^\s-]\S*)",
    re.IGNORECASE,
)
_URL = re.compile(r"(?<![a-z0-9+.\-])[a-z][a-z0-9+.\-]*://[^\s\"'<>]+", re.IGNORECASE)
_AT = re.compile(r"(?<![\w.+\-])[\w.+\-]+@[\w.\-]+")
_PRIVATE_IP = re.compile(
    r"(?<![\w.])(?:10|127|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3}(?![\w.])|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?=:\d)"
)
_DEVICE_UUID = re.compile(
    r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE
)
_MAC = re.compile(r"\b[0-9a-f]{2}(?::[0-9a-f]{2}){5}\b", re.IGNORECASE)
# a person's name may have spaces, where the folder that it names is followed by another separator
_SPACED_HOME = re.compile(
    r"(?i)(?:[a-z]:)?[\\/]+(?:users|home|documents and settings)[\\/]+"
    r"[^\\/\s\"':=,;]{1,60}(?: [^\\/\s\"':=,;\-][^\\/\s\"':=,;]{0,60}){0,2}(?=[\\/])"
)
_HOME_ITSELF = re.compile(
    r"(?i)(?:[a-z]:)?[\\/]+(?:users|home|documents and"
    r" settings)[\\/]+[^\\/\s\"':=,;]+[\\/]*(?![\w\\/.\-])"
)
_STOP = r"\s\"'`<>|;,=()\[\]{}"
_QUOTED = re.compile(
    r"(?P<quote>[\"'`])(?P<path>(?:[A-Za-z]:(?=[\\/])|~[\w.\-]*(?=/))?[\\/][^\"'`\n]*)(?P=quote)"
)
_ABSOLUTE = re.compile(
    rf"(?<![\w.~])(?:[A-Za-z]:(?=[\\/])|~[\w.\-]*(?=/)|\\(?=\\))?[\\/][^{_STOP}:]+"
)
_RELATIVE = re.compile(rf"(?<![^{_STOP}:])(?:[^{_STOP}:/\\]+[\\/])+[^{_STOP}:/\\]*")
_FILE_ENDING = re.compile(r"\.[A-Za-z]\w{0,7}$")
_PUBLIC_SPEC = re.compile(r"(?:timm|torchvision):[\w.\-]+")


def anonymous(text: str, names: Iterable[str] | None = None) -> str:
    """`text` without paths, names, addresses and secrets; idempotent.

    `names`: the user and host names to remove, by default this machine's.
    """
    patterns = _patterns(tuple(this_machines_names() if names is None else names))
    for _ in range(ROUNDS):  # what one pass shortens may stand before something that it hid
        before, text = text, _pass(text, patterns)
        if text == before:
            break
    return text


def _pass(text: str, names: tuple[re.Pattern[str], ...]) -> str:
    text = _DEVICE_UUID.sub("GPU", text)
    text = _SECRET.sub(lambda m: f"{m['name']}{m['equals']}***", text)
    text = _HOST_OPTION.sub(lambda m: f"{m['name']}{m['equals']}host", text)
    text = _URL.sub(_short_url, text)
    text = _AT.sub("user", text)
    text = _MAC.sub("host", _PRIVATE_IP.sub("host", text))
    text = _SPACED_HOME.sub("/~", text)
    text = _HOME_ITSELF.sub("~", text)
    text = _QUOTED.sub(lambda m: f"{m['quote']}{_last_of(m['path'])}{m['quote']}", text)
    text = _ABSOLUTE.sub(lambda m: _last_of(m[0]), text)
    text = _RELATIVE.sub(lambda m: _last_of(m[0]) if _is_file_path(m[0]) else m[0], text)
    for pattern in names:
        text = pattern.sub("user", text)
    return text


def anonymous_entry(entry: Entry, names: Iterable[str] | None = None) -> Entry:
    """The entry with every free text anonymous, and without facts of the environment that name somebody."""
    clean = functools.partial(anonymous, names=None if names is None else tuple(names))
    return replace(
        entry,
        model=entry.model if _PUBLIC_SPEC.fullmatch(entry.model) else clean(entry.model),
        loss=None if entry.loss is None else clean(entry.loss),
        **{
            name: clean(getattr(entry, name))
            for name in ("device", "reason", "command", "notes", "source")
        },
        environment={
            clean(key): clean(value)
            for key, value in entry.environment.items()
            if not _IDENTIFYING_KEYS.search(key)
        },
    )


def signed(entry: Entry, keep_identity: bool = False) -> Entry:
    """A run that was measured here, with who measured it, as $TRAINPACE_MEASURED_BY says of itself, and, where identities are
    kept, the name of this machine. Shared runs have neither (`shared.shared_of`)."""
    who = printable(os.environ.get(MEASURED_BY, "")).strip()[:LONGEST_NAME]
    said = {"measured_by": who} if who and is_text(who) else {}
    if keep_identity:
        said["hostname"] = socket.gethostname()
    return replace(entry, environment={**entry.environment, **said}) if said else entry


@functools.cache
def this_machines_names() -> tuple[str, ...]:
    """User and host names of this machine, the longest first."""
    names = {
        os.environ.get(name, "")
        for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER", "HOSTNAME")
    }
    with contextlib.suppress(OSError, KeyError, ImportError):  # a container's user without a name
        names.add(getpass.getuser())
    with contextlib.suppress(RuntimeError):
        names.add(Path.home().name)
    names.add(socket.gethostname())
    names |= {name.split(".")[0] for name in names}
    return tuple(
        sorted(
            (n for n in names if len(n) > 1 and n.casefold() not in _NOBODY), key=len, reverse=True
        )
    )


@functools.cache
def _patterns(names: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(
        re.compile(rf"(?<![A-Za-z0-9]){re.escape(n)}(?![A-Za-z0-9])", re.IGNORECASE)
        for n in names
        if n
    )


def _short_url(match: re.Match[str]) -> str:
    """The scheme and the last component, without host, query or password."""
    scheme, _, rest = match[0].partition("://")
    folder, slash, name = re.split(r"[?#]", rest)[0].rstrip("/").rpartition("/")
    is_person = "@" in name or re.search(r"(?i)(^|/)(home|users)$", folder)
    return f"{scheme}:{name}" if slash and name and not is_person else scheme


def _last_of(path: str) -> str:
    """The last component of a path; ~ for a home folder."""
    parts = [part for part in re.split(r"[\\/]+", path) if part not in ("", ".", "..")]
    return "~" if not parts or parts[-1].startswith("~") else parts[-1]


def _is_file_path(text: str) -> bool:
    """Whether the text is a path, rather than a name with a slash such as facebook/opt-125m, 3/4 or tokens/s."""
    return (
        text.startswith((".", "~"))
        or "\\" in text
        or len(re.findall(r"[\\/]", text)) > 1
        or bool(_FILE_ENDING.search(text))
    )
