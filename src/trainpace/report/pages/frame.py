"""The one frame of every page file: title, verdict, body, data; scripts and styles inline, each allowed by its hash alone."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib.metadata import version

from trainpace.report.pages.assets import SCRIPTS, STYLES, asset
from trainpace.report.pages.figure import data_script


def document(
    title: str, verdict: Sequence[str], body: str, data: object, answer: bool = True, styles: Sequence[str] = ()
) -> str:
    """The whole file. `verdict`: sentences, the most important first; `answer` False where it is no. `data` is kept inside as
    JSON. `styles`: those that are in the body. The page fetches nothing: its own policy forbids it."""
    drawn = 'class="chart"' in body
    sheets = [asset(name) for name in STYLES if drawn or name == "page.css"]
    scripts = [asset(name) for name in SCRIPTS] if drawn else []
    script_hashes = _hashes(scripts) or "'none'"
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hashes([*sheets, *styles])}; base-uri 'none'; form-action 'none';"
        f" script-src {script_hashes}"
    )
    told = "".join(f"<p>{html.escape(line)}</p>" for line in verdict)
    kind = "verdict" if answer else "verdict no"
    said = f'<div class="{kind}">{told}</div>' if told else ""
    noscript = "<noscript><p>Charts need scripts; every figure is in the tables below each of them.</p></noscript>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title>{''.join(f'<style>{style}</style>' for style in sheets)}</head><body>"
        f"<main><h1>{html.escape(title)}</h1>{said}"
        f"{noscript if drawn else ''}{body}</main>"
        f"<footer>Made by trainpace {version('trainpace')}. This file holds all its data and fetches nothing.</footer>"
        f"{data_script(data, 'data')}{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


def _hashes(texts: Sequence[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
