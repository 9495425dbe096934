"""Which batch size to probe next, to find the largest that fits."""

from collections.abc import Collection

RESOLUTION = 1 / 64
"""Sizes closer than this share of the largest are the same answer."""


def next_for_largest(worked: Collection[int], failed: Collection[int], most: int) -> int | None:
    """Double until a batch size fails, then bisect. None once the largest that works is known, or is `most`.

    Where a smaller size failed than one that worked, sizes above the smallest failure are not trusted.
    """
    ceiling = min(failed, default=most + 1)
    floor = max((n for n in worked if n < ceiling), default=0)
    if floor >= most or ceiling <= 1:
        return None
    if not failed:
        return min(2 * floor, most) if floor else 1
    if ceiling - floor <= max(1, int(floor * RESOLUTION)):
        return None
    return (floor + ceiling) // 2
