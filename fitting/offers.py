"""Make the packaged snapshot of offers from the transcribed public catalogues: `python -m
fitting.offers OFFERS.csv`.

Every row keeps its source with the commit, and its date where one is known. Rows that cannot be
right are left out, and printed with the reason.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from pathlib import Path

from trainpace.core.errors import UnknownName
from trainpace.core.hardware import find_device
from trainpace.offers import Offer, write_offers

SNAPSHOT = Path(__file__).parents[1] / "src" / "trainpace" / "offers" / "snapshot.csv"

FORMS = [
    # (GPU as transcribed, provider, instance type, device): where the provider says more than the
    # transcription
    ("A100-80GB", "azure", r"NC\d+ads_A100_v4", "A100 PCIe 80GB"),
    ("A100-80GB", "hyperstack", r"n3-A100", "A100 PCIe 80GB"),
    ("A100-80GB", "runpod", r"A100-80GB_", "A100 PCIe 80GB"),
    ("A100-80GB", "", r"(?i)pci", "A100 PCIe 80GB"),
    ("A100-40GB", "lambda", r"a100$", "A100 PCIe 40GB"),
    ("A100-40GB", "", r"(?i)pci", "A100 PCIe 40GB"),
    ("V100-16GB", "azure", r"NC\d+r?s_v3", "V100 PCIe 16GB"),
    ("P100", "gcp", r"", "P100 PCIe"),
    ("RTXPRO6000", "aws", r"g7e", "RTX PRO 6000 Server"),
    ("RTXPRO6000", "oci", r"RTXPRO", "RTX PRO 6000 Server"),
]
CHEAPEST_KWH_USD = 0.04
"""An hour that costs less than the electricity of the GPU's TDP is a mistake:

catalogues have listed B200 at 0.01 dollars.
"""
DEAREST_HOUR_USD = 40.0
"""Per GPU; twice the highest price of a large cloud."""


def main() -> None:
    """Write the snapshot; print what was left out or changed."""
    with Path(sys.argv[1]).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    offers, reasons = checked(rows)
    SNAPSHOT.write_text(write_offers(offers), encoding="utf-8")
    print(
        f"{len(rows)} rows, {len(offers)} offers of {len({o.provider for o in offers})} providers in {SNAPSHOT.name}"
    )
    for reason, count in Counter(reasons).items():
        print(f"  {count} x {reason}")


def checked(rows: list[dict[str, str]]) -> tuple[tuple[Offer, ...], list[str]]:
    """The offers that can be right, and what was said of the others."""
    reasons: list[str] = []
    offers: list[Offer] = []
    seen: set[tuple[str, str, str]] = set()
    for row in rows:
        key = (row["provider"], row["instance_type"], row["region"])
        if key in seen:
            reasons.append(f"left out, twice in the list: {' '.join(key)}")
            continue
        seen.add(key)
        try:
            device = find_device(_device_of(row))
        except UnknownName:
            reasons.append(f"left out, not in the hardware catalogue: {row['gpu']}")
            continue
        memory = _number(row["gpu_memory_gib"])
        if memory and device.memory_gib and not 0.85 < memory / device.memory_gib.value < 1.15:
            reasons.append(f"left out, {memory:g} GiB are no {device.name}: {' '.join(key)}")
            continue
        price, spot = float(row["price_usd_per_hour"] or 0), _number(row["spot_price_usd_per_hour"])
        if price <= 0:
            reasons.append(f"left out, no price: {' '.join(key)}")
            continue
        per_gpu = price / int(row["gpu_count"])
        watts = device.tdp_w.value if device.tdp_w else 0.0
        if not watts / 1e3 * CHEAPEST_KWH_USD < per_gpu < DEAREST_HOUR_USD:
            reasons.append(
                f"left out, {per_gpu:g} dollars a GPU and hour cannot be right: {' '.join(key)}"
            )
            continue
        if spot is not None and not 0 < spot < price:
            reasons.append(f"without its spot price, which is not below the other: {' '.join(key)}")
            spot = None
        vast = row["provider"] == "vast"  # whose rows carry a placeholder for processors and memory
        vcpus, ram = (None, None) if vast else (_number(row["vcpus"]), _number(row["memory_gib"]))
        offers.append(
            Offer(
                provider=row["provider"],
                instance_type=row["instance_type"],
                region=row["region"].lstrip(", "),
                device=device.name,
                count=int(row["gpu_count"]),
                gpu_memory_gib=memory,
                vcpus=None if vcpus is None else int(vcpus),
                ram_gib=ram,
                price_usd_per_hour=price,
                spot_price_usd_per_hour=spot,
                source=row["source"],
                as_of=row["as_of"] or None,
            )
        )
    return tuple(offers), reasons


def _device_of(row: dict[str, str]) -> str:
    for gpu, provider, pattern, device in FORMS:
        if (
            row["gpu"] == gpu
            and provider in ("", row["provider"])
            and re.search(pattern, row["instance_type"])
        ):
            return device
    return row["gpu"]


def _number(text: str) -> float | None:
    return float(text) if text else None


if __name__ == "__main__":
    main()
