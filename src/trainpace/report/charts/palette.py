"""Colours by what they mean, for light and dark pages, told apart by eyes of every kind.

Hues are Okabe and Ito's (2008, "Color Universal Design"), darkened or lightened until each is at contrast 3:1 or more against
its page (WCAG 2.2, 1.4.11); tests/report/test_palette.py computes it. Neighbours in a stack differ in lightness too.
"""

PAGE = ("#ffffff", "#14191f")
INK = ("#1b2530", "#e8edf2")
SOFT = ("#566270", "#a3b0bd")
LINE = ("#dde3e9", "#36414c")

TONES: dict[str, tuple[str, str]] = {
    "measured": ("#0063a8", "#58b4f0"),
    "forecast": ("#b85c00", "#f0a030"),
    "best": ("#00795a", "#2fc79a"),
    "jump": ("#a8327c", "#e88fc4"),
    "limit": ("#b3261e", "#ff8a80"),
    "ideal": ("#66727f", "#8f9ca9"),
    "muted": ("#7b8794", "#77838f"),
    "first": ("#0063a8", "#58b4f0"),
    "second": ("#b85c00", "#f0a030"),
    "third": ("#00795a", "#2fc79a"),
    "fourth": ("#a8327c", "#e88fc4"),
    "fifth": ("#806a00", "#d8c440"),
    "sixth": ("#5e4bb0", "#b0a2f5"),
    # parts of a step
    "forward": ("#0063a8", "#58b4f0"),
    "backward": ("#c06a10", "#f0a030"),
    "optimizer": ("#00795a", "#2fc79a"),
    "communication": ("#7a3fa8", "#c39bf0"),
    "data": ("#b3261e", "#ff8a80"),
    "host_to_device": ("#35748a", "#7cc6dc"),
    "host_overhead": ("#806a00", "#d8c440"),
    "idle": ("#808b97", "#6f7b87"),
    # kinds of memory
    "parameters": ("#0063a8", "#58b4f0"),
    "gradients": ("#c06a10", "#f0a030"),
    "states": ("#00795a", "#2fc79a"),
    "activations": ("#7a3fa8", "#c39bf0"),
    "reserve": ("#808b97", "#6f7b87"),
}
"""(on a light page, on a dark page)."""
SERIES_TONES = ("first", "second", "third", "fourth", "fifth", "sixth")
"""For series that have no meaning of their own, in this order."""


def css_variables() -> str:
    """`--ink`, `--page`, ..., `--tone-NAME` for both schemes; on paper, and with class `paper`, the light ones hold."""
    names = {"page": PAGE, "ink": INK, "soft": SOFT, "line": LINE}
    pairs = {f"--{name}": pair for name, pair in names.items()} | {
        f"--tone-{name}": pair for name, pair in TONES.items()
    }
    light, dark = (";".join(f"{name}:{pair[i]}" for name, pair in pairs.items()) for i in (0, 1))
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not(.paper){{{dark}}}}}\n"
    )
