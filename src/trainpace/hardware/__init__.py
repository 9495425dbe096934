"""Devices and the CPUs beside them, their figures with sources, and clusters of them."""

from trainpace.hardware.catalogue_reader import (
    catalogue,
    catalogue_name,
    find_device,
    normalised,
    parse_catalogue,
)
from trainpace.hardware.cluster import Cluster, Device, Figure, HostCPU, HostLinks
from trainpace.hardware.hosts import TypicalHost, find_host, host_catalogue, typical_host

__all__ = [
    "Cluster",
    "Device",
    "Figure",
    "HostCPU",
    "HostLinks",
    "TypicalHost",
    "catalogue",
    "catalogue_name",
    "find_device",
    "find_host",
    "host_catalogue",
    "normalised",
    "parse_catalogue",
    "typical_host",
]
