"""The charts of docs/charts.md: real answers as SVG by --figure, in colours that follow the reader's light or dark theme.

    python benchmarks/chart_gallery.py             # all
    python benchmarks/chart_gallery.py plan        # of some answers

What --figure writes is for papers, and so always light; here every colour of the palette becomes a CSS variable that is another
in the dark. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from trainpace.report.charts import INK, LINE, PAGE, SOFT, TONES

ROOT = Path(__file__).parents[1]
CHARTS = ROOT / "docs" / "pictures" / "charts"
JOB = ["--samples", "1281167", "--epochs", "90"]
MOST_BYTES = 250_000
TENTHS = re.compile(r"(\d\.\d)\d+")
"""Of a pixel, which are enough for an outline."""
ANSWERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "forecast": (
        ["forecast", "resnet50", "--gpu", "T4", "--batch", "1:64", "--no-journal"],
        {"": "batch", "roofline-of-t4-batch-64": "roofline"},
    ),
    "memory": (
        ["forecast", "vgg16", "--gpu", "T4", "--batch", "32", "--no-journal"],
        {"memory-over-the-step": "memory"},
    ),
    "cluster": (
        [
            "forecast",
            "resnet50",
            "--gpu",
            "A100",
            "--num-gpus",
            "4",
            "--nodes",
            "4",
            "--network",
            "12.5",
            "--batch",
            "64",
            "--precision",
            "amp_fp16",
            "--no-journal",
        ],
        {"scaling-over-devices": "scaling"},
    ),
    "match": (["match", "resnet50", *JOB], {"": "pareto"}),
}
"""The command, and of its charts (by what their files' names end in) those that are shown, under their names in the gallery."""


def main() -> None:
    """Make the charts of the answers that were named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *ANSWERS], default=[], metavar="NAME")
    CHARTS.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().names or ANSWERS:
        command, charts = ANSWERS[name]
        with tempfile.TemporaryDirectory() as folder:
            made = [sys.executable, "-m", "trainpace", *command, "--figure", f"{folder}/x.svg"]
            subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
            for ending, short in charts.items():
                text = themed(
                    (Path(folder) / f"x{ending and '-'}{ending}.svg").read_text(encoding="utf-8")
                )
                assert len(text.encode()) <= MOST_BYTES, (
                    f"{short}.svg would have {len(text.encode()):,} bytes"
                )
                (CHARTS / f"{short}.svg").write_text(text, encoding="utf-8")
                print(f"{short}.svg: {len(text.encode()) / 1024:.0f} KiB")


def themed(svg: str) -> str:
    """The picture with a variable for every colour of the palette."""
    pairs = dict([PAGE, INK, SOFT, LINE, *TONES.values()])
    used = [light for light in pairs if light in svg]
    for i, light in enumerate(used):
        svg = svg.replace(light, f"var(--c{i})")
    light, dark = (
        ";".join(f"--c{i}:{one(colour)}" for i, colour in enumerate(used))
        for one in (str, pairs.__getitem__)
    )
    style = f"<style>svg{{{light}}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    begin = re.search(r"<svg [^>]*>", svg)
    assert begin is not None
    return svg[: begin.end()] + style + re.sub(r'(?<= d=")[^"]*', _short, svg[begin.end() :])


def _short(outline: re.Match[str]) -> str:
    return " ".join(TENTHS.sub(r"\1", outline[0]).split())


if __name__ == "__main__":
    main()
