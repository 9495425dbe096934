"""Devices that compute (one GPU, one die of it where software sees two, or the machine's CPU), and clusters of them.

A device brings figures and nothing else; `trainpace.forecast` turns them into the times of kernels.
"""

import re
from typing import Literal

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record, check_fields

FigureKind = Literal["datasheet", "derived", "measured", "secondary"]
"""datasheet: the maker's own document. derived: computed from the maker's figures. measured: by the named
measurement. secondary: a third party's tables, where the maker publishes nothing."""
HostKind = Literal["server", "desktop", "laptop"]
HOST_KINDS: tuple[HostKind, ...] = ("server", "desktop", "laptop")


class Figure(Record):
    """One number about a device, and where it came from."""

    value: float
    source: str
    kind: FigureKind

    def __post_init__(self) -> None:
        if not 1e-6 <= self.value <= 1e9:
            raise ValueError(f"a hardware figure must be from 1e-6 to 1e9, not {self.value}")


class Device(Record):
    """What a datasheet says of one device. Rates are dense (never sparse) and in TFLOP/s (1e12 FLOP/s).

    ``*_tensor_tflops`` are matrix-unit rates with **fp32 accumulation**, which is what training uses: GeForce cards
    run fp16 with fp32 accumulation at half the rate that their box names. ``None`` means: the device has no such
    unit, or nobody published the figure. `nvlink_domain`: how many devices NVLink joins over several nodes.
    """

    name: str
    vendor: str = ""
    architecture: str = ""
    kind: Literal["gpu", "cpu"] = "gpu"
    aliases: tuple[str, ...] = ()
    form_factor: str = ""
    compute_capability: str = ""

    sms: Figure | None = None
    fp32_lanes_per_sm: Figure | None = None
    base_clock_mhz: Figure | None = None
    boost_clock_mhz: Figure | None = None
    process_nm: Figure | None = None

    fp32_tflops: Figure | None = None
    fp16_tflops: Figure | None = None
    tf32_tensor_tflops: Figure | None = None
    fp16_tensor_tflops: Figure | None = None
    bf16_tensor_tflops: Figure | None = None
    fp8_tensor_tflops: Figure | None = None
    fp4_tensor_tflops: Figure | None = None

    memory_gib: Figure | None = None
    memory_bandwidth_gb_per_s: Figure | None = None
    memory_bus_bits: Figure | None = None
    memory_rate_gbit_per_s_per_pin: Figure | None = None
    l2_mib: Figure | None = None
    shared_memory_per_sm_kib: Figure | None = None

    nvlink_generation: Figure | None = None
    nvlink_domain: Figure | None = None
    link_gb_per_s: Figure | None = None
    pcie_generation: Figure | None = None
    pcie_lanes: Figure | None = None
    tdp_w: Figure | None = None

    @property
    def torch_precision(self) -> Literal["fp32", "torch_fp32"]:
        """What torch computes a model of fp32 in, unless it is told otherwise: convolutions in TF32 on cards that have it."""
        return "fp32" if self.tf32_tensor_tflops is None else "torch_fp32"

    @property
    def is_consumer(self) -> bool:
        """Desktops' GeForce and Titan cards: clocks above the sheet, no peer access over PCIe, bridges seldom."""
        return bool(re.match(r"Titan|[GR]TX \d0[5-9]0(?!.*(Max-Q|Laptop))", self.name))


class HostCPU(Record):
    """The CPU that launches a GPU's kernels. `single_thread` is in points of PassMark's single-thread test.

    turbo_ghz: the highest clock of one core. `rough`: the points per GHz are those of a related core.
    """

    name: str
    vendor: str
    core: str
    kind: HostKind
    year: int
    turbo_ghz: float
    single_thread: Figure
    rough: bool = False
    aliases: tuple[str, ...] = ()


class HostLinks(Record):
    """The links between CPU hosts as gloo's collectives were seen to use them over TCP (`trainpace calibrate --hosts`).

    `start_us` is what a collective costs once, `message_us` one step of its algorithm besides the bytes, and
    `host_us_per_mib` the hosts' own work for a MiB sent by each collective (copies, sums), which the link's work does
    not hide. `link_share` of the stated bandwidth carries payload; `burst_bytes` pass at once before a shaped link
    holds them to its rate. `duplex_excess` is how much longer than its bytes say an all-gather of two hosts takes:
    they send each other all at once over one connection, where more hosts pass on over two. `gb_per_s` is a host's
    bandwidth in one direction (1e9 bytes a second) where it was measured; a cluster's `network_gb_per_s_per_device`
    goes before it.
    """

    start_us: float
    message_us: float
    host_us_per_mib: dict[str, float]
    gb_per_s: float
    link_share: float
    burst_bytes: float = 0.0
    duplex_excess: float = 0.0

    def __post_init__(self) -> None:
        costs = (
            self.start_us,
            self.message_us,
            self.burst_bytes,
            self.duplex_excess,
            *self.host_us_per_mib.values(),
        )
        if min(costs) < 0:
            raise TrainpaceError("a link's latencies and host costs cannot be below 0.")
        if not 0 < self.link_share <= 1 or not self.gb_per_s > 0:
            raise TrainpaceError(
                "a link's bandwidth must be above 0, and the share of it for payload within 0 to 1."
            )


class Cluster(Record):
    """`nodes` equal nodes of `devices_per_node` equal devices; the price is for one device and one hour.

    `network_gb_per_s_per_device` is a node's network bandwidth in one direction, divided by its devices;
    `network_latency_us` the time of one small message between two nodes. `pcie_peer_access` says whether devices read
    each other's memory over PCIe; None stands for what the cards usually can. `host` is the CPU that launches kernels; None:
    nobody named it. `host_links` are the links of CPU hosts, as measured.
    """

    device: Device
    devices_per_node: int = 1
    nodes: int = 1
    price_usd_per_device_hour: float | None = None
    network_gb_per_s_per_device: float | None = None
    network_latency_us: float | None = None
    pcie_peer_access: bool | None = None
    host: HostCPU | None = None
    host_links: HostLinks | None = None

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.nodes < 1:
            raise TrainpaceError(
                f"a cluster of {self.nodes} nodes with {self.devices_per_node} devices each is"
                " empty."
            )
        check_fields(
            self,
            ("price_usd_per_device_hour",),
            lambda price: 0 <= price <= 1e6,
            "from 0 to 1e6 dollars",
        )
        check_fields(
            self,
            ("network_gb_per_s_per_device", "network_latency_us"),
            lambda value: value > 0,
            "above 0",
        )

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    @property
    def devices_per_domain(self) -> int:
        """Devices that share a node, or NVLink over several of them."""
        domain = self.device.nvlink_domain
        return max(self.devices_per_node, int(domain.value) if domain else 1)
