"""A cluster: one kind of device, how many to a node and how many nodes, what it costs."""

from __future__ import annotations

from trainpace.errors import TrainpaceError
from trainpace.hardware.device import Device
from trainpace.records import Record


class Cluster(Record):
    """`nodes` equal nodes of `devices_per_node` equal devices; the price is for one device and one hour.

    `network_gb_per_s_per_device` is a node's network bandwidth in one direction, divided by its devices.
    """

    device: Device
    devices_per_node: int = 1
    nodes: int = 1
    price_usd_per_device_hour: float | None = None
    network_gb_per_s_per_device: float | None = None

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.nodes < 1:
            raise TrainpaceError(f"a cluster of {self.nodes} nodes with {self.devices_per_node} devices each is empty.")
        price = self.price_usd_per_device_hour
        if price is not None and not 0 <= price <= 1e6:
            raise TrainpaceError(f"a price of {price} dollars per device and hour cannot be right.")

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node
