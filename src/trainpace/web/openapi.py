"""The JSON twins in OpenAPI's words, made from the records themselves."""

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from trainpace.records import Record


class _Described(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def question(self) -> type[Record]: ...
    @property
    def record(self) -> type[Record]: ...


def describe(pages: Iterable[_Described], version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document of every page's ``.json``."""
    pages = tuple(pages)
    error = {
        "description": "One sentence on what cannot be answered.",
        "content": {"application/json": {"schema": {"type": "object", "required": ["message", "status"]}}},
    }
    # what is refused before any page sees it (too long, not allowed) is told as a page of one sentence
    refused = {"description": "Refused.", "content": {"text/html": {"schema": {"type": "string"}}}}
    paths = {}
    for page in pages:
        answer = {"type": "object", "required": ["record", "schema_version", *page.record.__struct_fields__]}
        paths[f"{page.path}.json"] = {
            "get": {
                "summary": page.title,
                "parameters": _parameters(page.question),
                "responses": {
                    "200": {"description": page.title, "content": {"application/json": {"schema": answer}}},
                    **dict.fromkeys(("400", "404", "422", "500", "503"), error),
                    "default": refused,
                },
            }
        }
    return {"openapi": "3.1.0", "info": {"title": "Trainpace", "version": version}, "paths": paths}


def _parameters(question: type[Record]) -> list[dict[str, Any]]:
    (schema,), components = msgspec.json.schema_components([question])
    own = components[schema["$ref"].rsplit("/", 1)[-1]] if "$ref" in schema else schema
    return [
        {"name": name, "in": "query", "required": name in own.get("required", ()), "schema": shape}
        for name, shape in own["properties"].items()
    ]
