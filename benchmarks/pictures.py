"""Screenshots of real answers for the documentation: runs the commands, opens their pages in Chromium, writes docs/pictures/.

    python benchmarks/pictures.py                  # all
    python benchmarks/pictures.py forecast match   # some

Needs playwright and Pillow (development only) and a Chromium. What it shows of this machine is as good as the machine is quiet.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 980, 1500
COLOURS = 200
JOB = ["--samples", "1281167", "--epochs", "90"]
Scheme = Literal["light", "dark"]
COMMANDS: dict[str, tuple[Scheme, list[str]]] = {
    "forecast": (
        "light",
        ["forecast", "resnet50", "--gpu", "T4", "--batch", "1:64", "--no-journal"],
    ),
    "forecast_cluster": (
        "dark",
        [
            "forecast",
            "resnet50",
            "--gpu",
            "T4",
            "--gpu",
            "A100",
            "--gpu",
            "H100",
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
            *JOB,
            "--price",
            "2",
            "--no-journal",
        ],
    ),
    "match": ("light", ["match", "resnet50", *JOB, "--spot"]),
    "plan": (
        "light",
        [
            "plan",
            "resnet50",
            "--gpu",
            "A100",
            "--num-gpus",
            "4",
            "--batch",
            "64",
            *JOB,
            "--price",
            "2.5",
            "--workers",
            "4",
            "--sample-ms",
            "8",
            "--cores",
            "32",
        ],
    ),
    "sweep": (
        "light",
        ["measure", "examples/photo_tasks.py:cnn", "--batch", "1:64", "--no-journal"],
    ),
    "diagnosis": (
        "dark",
        ["diagnose", "--epochs", "20", "--", "python", "benchmarks/planted/scripts/slow_decode.py"],
    ),
    "ladder": ("light", ["run", "examples/ladder/ladder.toml", "--no-journal"]),
}
"""The scheme that is shown, and the command."""


def main() -> None:
    """Make the pictures that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *COMMANDS], default=[], metavar="NAME")
    parser.add_argument(
        "--pages",
        type=Path,
        help="a folder with NAME.html already in it, in place of running commands",
    )
    options = parser.parse_args()
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or COMMANDS:
            scheme, command = COMMANDS[name]
            page = (options.pages or Path(folder)) / f"{name}.html"
            if options.pages is None:
                made = [command[0], "--html", str(page), *command[1:]]
                if command[0] == "run":
                    made += ["--out", f"{folder}/run"]
                subprocess.run(
                    [sys.executable, "-m", "trainpace", *made],
                    cwd=ROOT,
                    check=False,
                    stdout=subprocess.DEVNULL,
                )
            page.write_text(
                page.read_text(encoding="utf-8").replace(f"{ROOT}/", ""), encoding="utf-8"
            )  # no machine's paths
            size = save_picture(page, PICTURES / f"{name}.png", scheme)
            print(f"{name}.png: {size / 1024:.0f} KiB")


def save_picture(page: Path, target: Path, scheme: Scheme) -> int:
    """The top of a page, in few colours; its bytes."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        opened = browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme, offline=True
        )
        opened.goto(page.resolve().as_uri())
        whole = int(opened.evaluate("document.documentElement.scrollHeight"))
        shot = opened.screenshot(
            clip={"x": 0, "y": 0, "width": WIDTH, "height": min(HEIGHT, whole)}, full_page=True
        )
        browser.close()
    few = Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE)
    few.save(target, optimize=True)
    return target.stat().st_size


if __name__ == "__main__":
    main()
