"""Read the packaged catalogue, or a user's file in the same form, into Devices.

A file has ``[sources]`` (key -> title and kind), ``[figure_sources]`` (figure -> key; all others come from ``sheet``)
and one ``[[gpu]]`` a device. A figure is a number, or ``{ value = 80, source = "key", kind = "derived" }`` where its
source or kind is not the file's usual one. A user's file may leave both tables out: its figures then cite the file.
"""

import functools
import itertools
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainpace.core.cluster import Device, Figure
from trainpace.core.errors import UnknownName, UnreadableInput, nearest_names
from trainpace.core.intake import toml_of

FOLDER = Path(__file__).parent / "catalogue"
_NAMES = re.compile(r"^name = .*$|^aliases = \[[^\]]*\]", re.MULTILINE)
_PLAIN = re.compile(
    r'(\w+) = (?:("[^"\\]*"|\[[^\\]*\])|(\d+(?:\.\d+)?)|\{ value = (\d+(?:\.\d+)?), source ='
    r' "(\w+)" \})'
)
_VENDOR_WORDS = re.compile(r"^(nvidia|amd|intel|habana|tesla|geforce|instinct|radeon)+")
_FIGURES = {field.name for field in msgspec.structs.fields(Device) if field.type == Figure | None}


def parse_catalogue(text: str, source: str) -> tuple[Device, ...]:
    """Devices of one TOML text. `source` names it in errors, which are always one sentence."""
    data = toml_of(text, source)
    unknown = data.keys() - {"sources", "figure_sources", "gpu"}
    if unknown:
        raise UnreadableInput(
            f"{source} has an unknown table [{sorted(unknown)[0]}].",
            "Known: sources, figure_sources, [[gpu]].",
        )
    entries = data.get("gpu", [])
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(entry, dict) for entry in entries)
    ):
        raise UnreadableInput(f"{source} has no [[gpu]] entries.")
    sources, figure_sources = data.get("sources", {}), data.get("figure_sources", {})
    if not isinstance(sources, dict) or not isinstance(figure_sources, dict):
        raise UnreadableInput(f"{source}: sources and figure_sources should be tables.")
    devices = tuple(_device(entry, sources, figure_sources, source) for entry in entries)
    taken: dict[str, Device] = {}
    for device in devices:
        for name in _names(device):
            other = taken.setdefault(normalised(name), device)
            if other is not device:
                raise UnreadableInput(
                    f"{source}: {name!r} names both {other.name} and {device.name}."
                )
    return devices


class _Entry(NamedTuple):
    """One device of a packaged file, unparsed, and what the file says of its sources."""

    file: str
    sources: str
    text: str


@functools.cache
def catalogue() -> tuple[Device, ...]:
    """Every packaged device."""
    return tuple(map(_device_of, _entries()))


@functools.cache
def _entries() -> dict[_Entry, str]:
    """Every packaged entry -> its names and aliases, normalised and joined."""
    entries: dict[_Entry, str] = {}
    for file in sorted(FOLDER.glob("*.toml")):
        sources, *texts = file.read_text("utf-8").split("\n[[gpu]]\n")
        entries |= {
            _Entry(file.name, sources, text): normalised(" ".join(_NAMES.findall(text)))
            for text in texts
        }
    return entries


@functools.cache
def _device_of(entry: _Entry) -> Device:
    about = _tables(entry.sources)
    return _device(
        _fields(entry.text), about["sources"], about.get("figure_sources", {}), entry.file
    )


@functools.cache
def _tables(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def _fields(text: str) -> dict[str, Any]:
    """What tomllib makes of a packaged entry, a tenth of its time where every line is plain: all entries would take it 0.15 s."""
    fields: dict[str, Any] = {}
    for line in text.strip().split("\n"):
        plain = _PLAIN.fullmatch(line)
        if plain is None:
            return tomllib.loads(text)
        key, words, number, value, source = plain.groups()
        figure = float(number) if number else {"value": float(value or 0), "source": source}
        fields[key] = msgspec.json.decode(words) if words else figure
    return fields


def find_device(name: str, extra: Iterable[Device] = ()) -> Device:
    """A device by its name or an alias, `extra` (the user's own) first.

    Case, spaces, hyphens, underscores and the maker's words in front ("NVIDIA", "Tesla", "GeForce") do not count;
    anything else must match. Raises `UnknownName` with the nearest names.
    """
    wanted = normalised(name)
    likely = (
        _device_of(entry) for entry, names in _entries().items() if wanted and wanted in names
    )
    for device in itertools.chain(extra, likely):
        if wanted and any(normalised(own) == wanted for own in _names(device)):
            return device
    names = [own for device in (*extra, *catalogue()) for own in _names(device)]
    raise UnknownName(
        "GPU", name, names, "Add it in a TOML file of your own, named with `hardware`."
    )


def _names(device: Device) -> tuple[str, ...]:
    return device.name, *device.aliases


@functools.cache
def catalogue_name(name: str) -> str:
    """A device's name as the catalogue has it, so that forecasts and runs of one device meet; another name as it is."""
    try:
        return find_device(name).name
    except UnknownName:
        return name


def normalised(name: str) -> str:
    """A name as it is compared: letters and digits only, without the maker's words in front."""
    return _VENDOR_WORDS.sub("", re.sub(r"[^a-z0-9]", "", name.casefold()))


def _device(
    entry: dict[str, Any], sources: dict[str, Any], figure_sources: dict[str, Any], source: str
) -> Device:
    name = entry.get("name")
    if not isinstance(name, str) or not normalised(name):
        raise UnreadableInput(f"{source}: an entry of [[gpu]] has no name.")
    fields = Device.__struct_fields__
    for key in sorted(entry.keys() - set(fields)):
        near = ", ".join(nearest_names(key, fields))
        raise UnreadableInput(
            f"{source}: {name} has an unknown key {key!r}.", f"Nearest: {near}." if near else ""
        )
    figures = {
        key: _figure(
            entry[key],
            figure_sources.get(key, "sheet"),
            sources,
            f"{source}: {key} of {name}",
            source,
        )
        for key in entry.keys() & _FIGURES
    }
    try:
        return msgspec.convert({**entry, **figures}, Device)
    except msgspec.ValidationError as error:
        raise UnreadableInput(f"{source}: {name}: {error}.") from None


def _figure(value: Any, key: Any, sources: dict[str, Any], where: str, file: str) -> dict[str, Any]:
    """One figure as a plain dict; `key` is the source of a bare number, `where` names it in errors."""
    own: dict[str, Any] = value if isinstance(value, dict) else {"value": value}
    if not sources:
        return {"source": file, "kind": "secondary", **own}
    key = own.get("source", key)
    origin = sources.get(key) if isinstance(key, str) else None
    if not isinstance(origin, dict) or "title" not in origin or "kind" not in origin:
        raise UnreadableInput(
            f"{where} cites the source {key!r}, which [sources] does not describe."
        )
    return {"kind": origin["kind"], **own, "source": origin["title"]}
