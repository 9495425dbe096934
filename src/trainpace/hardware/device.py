"""A device that computes: one GPU (or one die of it, where software sees two) or the machine's CPU.

A device brings figures and nothing else; what they mean for a kernel is the forecast's business.
"""

from typing import Literal

from trainpace.records import Record

FigureKind = Literal["datasheet", "derived", "measured", "secondary"]
"""datasheet: the maker's own document. derived: computed from the maker's figures. measured: by the named
measurement. secondary: a third party's tables, where the maker publishes nothing."""


class Figure(Record):
    """One number about a device, and where it came from."""

    value: float
    source: str
    kind: FigureKind

    def __post_init__(self) -> None:
        if not self.value > 0 or self.value > 1e9:
            raise ValueError(f"a hardware figure must be above 0 and finite, not {self.value}")


class Device(Record):
    """What a datasheet says of one device. Rates are dense (never sparse) and in TFLOP/s (1e12 FLOP/s).

    ``*_tensor_tflops`` are matrix-unit rates with **fp32 accumulation**, which is what training uses: GeForce cards
    run fp16 with fp32 accumulation at half the rate that their box names. ``None`` means: the device has no such
    unit, or nobody published the figure.
    """

    name: str
    vendor: str
    architecture: str
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
    link_gb_per_s: Figure | None = None
    pcie_generation: Figure | None = None
    pcie_lanes: Figure | None = None
    tdp_w: Figure | None = None
