"""Devices, their figures with sources, and clusters of them."""

from trainpace.hardware.catalogue_reader import catalogue, catalogue_name, find_device, parse_catalogue
from trainpace.hardware.cluster import Cluster, Device, Figure, HostLinks

__all__ = [
    "Cluster", "Device", "Figure", "HostLinks", "catalogue", "catalogue_name", "find_device", "parse_catalogue",
]  # fmt: skip
