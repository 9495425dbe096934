"""Devices, host CPUs and clusters, with packaged catalogues to find them by name.

A device only has figures. `trainpace.forecast` computes kernel times from them.
"""

import functools
import itertools
import re
import statistics
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from trainpace.core.errors import TrainpaceError, UnknownName, UnreadableInput, nearest_names
from trainpace.core.intake import toml_of
from trainpace.core.records import Record, check_fields, from_package

FigureKind = Literal["datasheet", "derived", "measured", "secondary"]
"""Kind of source of a figure.

- datasheet: The maker's own document.
- derived: Computed from the maker's figures.
- measured: The measurement that the source names.
- secondary: Tables of a third party, if the maker publishes no figure.
"""
HostKind = Literal["server", "desktop", "laptop"]
HOST_KINDS: tuple[HostKind, ...] = ("server", "desktop", "laptop")


class Figure(Record):
    """Number about a device, with its source."""

    value: float
    source: str
    kind: FigureKind

    def __post_init__(self) -> None:
        if not 1e-6 <= self.value <= 1e9:
            raise ValueError(f"a hardware figure must be from 1e-6 to 1e9, not {self.value}")


class Device(Record):
    """Datasheet of one device.

    Rates are for dense matrices, in TFLOP/s (1e12 FLOP/s). ``*_tensor_tflops`` are rates of matrix
    units with **fp32 accumulation**, which training uses. On GeForce cards this is half of the
    advertised fp16 rate. ``None`` means that the device has no such unit, or that the figure is not
    published. `nvlink_domain` is the number of devices that NVLink connects across nodes.
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
    def generation(self) -> str:
        """Major number of the compute capability, or "" if it is unknown."""
        return self.compute_capability.partition(".")[0]

    @property
    def torch_precision(self) -> Literal["fp32", "torch_fp32"]:
        """torch's default precision for fp32 models: convolutions run in TF32 if supported."""
        return "fp32" if self.tf32_tensor_tflops is None else "torch_fp32"

    @property
    def autocast_precision(self) -> Literal["amp_bf16", "amp_fp16"]:
        """Autocast with bf16 if the device has matrix units for it, else with fp16."""
        return "amp_fp16" if self.bf16_tensor_tflops is None else "amp_bf16"

    @property
    def is_consumer(self) -> bool:
        """True for desktop GeForce and Titan cards.

        They clock higher than their datasheet, have no PCIe peer access, and rarely NVLink bridges.
        """
        return bool(re.match(r"Titan|[GR]TX (\d0|16)[5-9]0(?!.*(Max-Q|Laptop))", self.name))


class HostCPU(Record):
    """Host CPU that launches a GPU's kernels.

    Attributes:
        turbo_ghz: Highest clock of a single core in GHz.
        single_thread: Points in PassMark's single-thread test.
        rough: True if the points are estimated from the points per GHz of a related core.
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
    """Links between CPU hosts, measured with gloo's collectives over TCP.

    `trainpace calibrate --hosts` measures them.

    Attributes:
        start_us: Fixed cost of a collective in microseconds.
        message_us: Cost of one step of the collective's algorithm in microseconds, without the
            bytes.
        host_us_per_mib: {collective: work of the hosts per MiB, such as copies and sums}, in
            microseconds. The transfer does not hide it.
        gb_per_s: Bandwidth of a host in one direction. A cluster's `network_gb_per_s_per_device`
            overrides it.
        link_share: Share of the nominal bandwidth that carries payload.
        burst_bytes: Bytes that pass at full speed before a shaped link limits the rate.
        duplex_excess: Extra time of an all-gather between two hosts, as a share. Two hosts send
            everything to each other over one connection. More hosts pass data on over two.
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
            raise TrainpaceError("latencies and host costs of a link must be 0 or more.")
        if not 0 < self.link_share <= 1 or not self.gb_per_s > 0:
            raise TrainpaceError(
                "the bandwidth of a link must be above 0, and its payload share from 0 to 1."
            )


class Cluster(Record):
    """Cluster of equal nodes with equal devices.

    Attributes:
        device: The device.
        devices_per_node: Number of devices per node.
        nodes: Number of nodes.
        price_usd_per_device_hour: Price of one device for one hour in US dollars.
        network_gb_per_s_per_device: Network bandwidth of a node in one direction, divided by its
            number of devices.
        network_latency_us: Time of a small message between two nodes in microseconds.
        pcie_peer_access: True if devices read each other's memory over PCIe. None means the usual
            behavior of such cards.
        host: CPU that launches kernels. None if not given.
        host_links: Measured links of CPU hosts.
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
        return self.nodes * self.devices_per_node

    @property
    def devices_per_domain(self) -> int:
        """Number of devices connected by a node, or by NVLink across several nodes."""
        domain = self.device.nvlink_domain
        return max(self.devices_per_node, int(domain.value) if domain else 1)


# ---- the catalogue of devices

FOLDER = Path(__file__).parent / "catalogue"
_NAMES = re.compile(r"^name = .*$|^aliases = \[[^\]]*\]", re.MULTILINE)
_VENDOR_WORDS = re.compile(
    r"^(nvidia|amd|intel|apple|habana|tesla|geforce|instinct|radeon|(rtx|gtx|rx)(?=a?\d))+"
)
_FIGURES = {field.name for field in msgspec.structs.fields(Device) if field.type == Figure | None}


def parse_catalogue(text: str, source: str) -> tuple[Device, ...]:
    """Parse devices from a TOML text.

    The text has a table ``[sources]`` (key -> title and kind), a table ``[figure_sources]`` (figure
    -> key), and one ``[[gpu]]`` per device. Figures without an entry in ``[figure_sources]`` come
    from the source ``sheet``. A figure is a number. If it has another source or kind, it is
    ``{ value = 80, source = "key", kind = "derived" }``. A user's file may omit both tables. Its
    figures then cite the file.

    Args:
        text: The TOML text.
        source: Name of the text, for errors and sources.
    """
    data = toml_of(text, source)
    unknown = data.keys() - {"sources", "figure_sources", "gpu"}
    if unknown:
        raise UnreadableInput(
            f"{source} has an unknown table [{sorted(unknown)[0]}].",
            "Known: sources, figure_sources, [[gpu]].",
        )
    entries = data.get("gpu", [])
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(entry, dict) for entry in entries)
    ):
        raise UnreadableInput(f"{source} has no [[gpu]] entries.")
    sources, figure_sources = data.get("sources", {}), data.get("figure_sources", {})
    if not isinstance(sources, dict) or not isinstance(figure_sources, dict):
        raise UnreadableInput(f"{source}: `sources` and `figure_sources` must be TOML tables.")
    devices = tuple(_device(entry, sources, figure_sources, source) for entry in entries)
    _check_names(devices, source)
    return devices


def _check_names(devices: Iterable[Device], source: str) -> None:
    taken: dict[str, Device] = {}
    for device in devices:
        for name in _names(device):
            other = taken.setdefault(normalised(name), device)
            if other is not device:
                raise UnreadableInput(
                    f"{source}: {name!r} names both {other.name} and {device.name}."
                )


class _Entry(NamedTuple):
    """Unparsed device of a packaged file, with the sources of the file."""

    file: str
    sources: str
    text: str


@functools.cache
def catalogue() -> tuple[Device, ...]:
    """Return all devices of the packaged catalogue."""
    return tuple(map(_device_of, _entries()))


@functools.cache
def _entries() -> dict[_Entry, str]:
    """Return {packaged entry: its normalized name and aliases, joined}."""
    entries: dict[_Entry, str] = {}
    for file in sorted(FOLDER.glob("*.toml")):
        sources, *texts = file.read_text("utf-8").split("\n[[gpu]]\n")
        entries |= {
            _Entry(file.name, sources, text): normalised(" ".join(_NAMES.findall(text)))
            for text in texts
        }
    return entries


@functools.cache
def _device_of(entry: _Entry) -> Device:
    about = _tables(entry.sources)
    fields = tomllib.loads(entry.text)
    return _device(fields, about["sources"], about.get("figure_sources", {}), entry.file)


_tables = functools.cache(tomllib.loads)


def find_device(name: str, extra: Iterable[Device] = ()) -> Device:
    """Find a device by its name or an alias.

    Case, spaces, hyphens, underscores and the maker's leading words ("NVIDIA", "Tesla", "GeForce")
    are ignored.

    Args:
        name: The name.
        extra: The user's own devices, which are searched first.

    Raises:
        UnknownName: If no device has the name. The message lists similar names.
    """
    wanted = normalised(name)
    likely = (
        _device_of(entry) for entry, names in _entries().items() if wanted and wanted in names
    )
    for device in itertools.chain(extra, likely):
        if wanted and any(normalised(own) == wanted for own in _names(device)):
            return device
    names = [own for device in (*extra, *catalogue()) for own in _names(device)]
    raise UnknownName(
        "GPU", name, names, "Add it in a TOML file of your own, and pass that with `hardware`."
    )


def _names(device: Device) -> tuple[str, ...]:
    return device.name, *device.aliases


@functools.cache
def catalogue_name(name: str) -> str:
    """Return the catalogue's name of a device, or an unknown name unchanged.

    With it, forecasts and runs of the same device have the same name.
    """
    try:
        return find_device(name).name
    except UnknownName:
        return name


def normalised(name: str) -> str:
    """Return the letters and digits of a device name without the maker, for comparison."""
    return _VENDOR_WORDS.sub("", re.sub(r"[^a-z0-9]", "", name.casefold()))


def _device(
    entry: dict[str, Any], sources: dict[str, Any], figure_sources: dict[str, Any], source: str
) -> Device:
    name = entry.get("name")
    if not isinstance(name, str) or not normalised(name):
        raise UnreadableInput(f"{source}: an entry of [[gpu]] has no name.")
    fields = Device.__struct_fields__
    for key in sorted(entry.keys() - set(fields)):
        near = ", ".join(nearest_names(key, fields))
        raise UnreadableInput(
            f"{source}: {name} has an unknown key {key!r}.", f"Nearest: {near}." if near else ""
        )
    figures = {
        key: _figure(
            entry[key],
            figure_sources.get(key, "sheet"),
            sources,
            f"{source}: {key} of {name}",
            source,
        )
        for key in entry.keys() & _FIGURES
    }
    try:
        return msgspec.convert({**entry, **figures}, Device)
    except msgspec.ValidationError as error:
        raise UnreadableInput(f"{source}: {name}: {error}.") from None


def _figure(value: Any, key: Any, sources: dict[str, Any], where: str, file: str) -> dict[str, Any]:
    """Return a figure as a plain dict. `key` is the source of a figure without its own source."""
    own: dict[str, Any] = value if isinstance(value, dict) else {"value": value}
    if not sources:
        return {"source": file, "kind": "secondary", **own}
    key = own.get("source", key)
    origin = sources.get(key) if isinstance(key, str) else None
    if not isinstance(origin, dict) or "title" not in origin or "kind" not in origin:
        raise UnreadableInput(
            f"{where} cites the source {key!r}, which [sources] does not describe."
        )
    return {"kind": origin["kind"], **own, "source": origin["title"]}


# ---- the catalogue of host CPUs

FILE = Path(__file__).parent / "hosts.toml"
ANY_GENERATION = "any"
_WORKSTATION = re.compile(r"RTX A\d|RTX \d+ Ada|Quadro|RTX PRO(?!.*Server)")
_DESKTOP = re.compile(r"[GR]TX \d|RX \d|Titan|Arc\b")
_NOISE = re.compile(
    r"\((r|tm)\)|@.*|\b\d+-cores?\b|\b\d+th"
    r" gen\b|\b(processors?|cpus?|with|intel|amd|nvidia|xeon|epyc|core)\b"
)
_FAMILY = re.compile(r"\b(ryzen( threadripper)?( \d)?|threadripper|pro|platinum|gold|silver)\b")


class TypicalHost(Record):
    """Assumed host of a card: the median of the hosts with such cards.

    Attributes:
        name: Name of the CPU.
        points: Single-thread rating in PassMark's points.
        log_sd: Standard deviation of the logarithm of the hosts' ratings.
    """

    name: str
    points: float
    log_sd: float


class TypicalHosts(Record):
    """Typical hosts by kind of machine and generation of cards, or ANY_GENERATION."""

    machines: dict[str, dict[str, TypicalHost]]


@functools.cache
def host_catalogue() -> tuple[HostCPU, ...]:
    """Return all host CPUs of the packaged catalogue."""
    return tuple(_read(FILE.read_text("utf-8")))


def find_host(name: str) -> HostCPU:
    """Find a host CPU by a name as people, clouds and /proc/cpuinfo write it.

    Case, spaces, hyphens, clocks, numbers of cores and the maker's words ("Intel(R) Xeon(R)") are
    ignored. The model number alone is enough if only one CPU has it ("8480+", "13900K").

    Raises:
        UnknownName: If no CPU has the name.
    """
    full, number = _by_name()
    found = full.get(normalised_host(name)) or number.get(_number(name), [])
    if len(found) != 1:
        names = [cpu.name for cpu in found or host_catalogue()]
        raise UnknownName(
            "host CPU", name, names, "Give a CPU with a similar single-core speed, or no host."
        )
    return found[0]


def normalised_host(name: str) -> str:
    """Return the letters, digits and plus signs of a CPU name without maker and clock."""
    return re.sub(r"[^a-z0-9+]", "", _NOISE.sub(" ", name.casefold()))


def typical_host(device: Device) -> TypicalHost:
    """Return the assumed host of a card."""
    generations = _typical_hosts().machines[_machine(device)]
    return generations.get(device.architecture) or generations[ANY_GENERATION]


@functools.cache
def _typical_hosts() -> TypicalHosts:
    return from_package("core/typical_hosts.json", TypicalHosts)


def _machine(device: Device) -> str:
    """Return the kind of machine in which a card is usually installed, such as server or laptop."""
    if device.form_factor in ("module", "integrated") and device.vendor == "NVIDIA":
        return "superchip"
    if device.form_factor in ("mobile", "integrated"):
        return "laptop"
    if _WORKSTATION.match(device.name):
        return "workstation"
    return "desktop" if _DESKTOP.match(device.name) else "server"


@functools.cache
def _by_name() -> tuple[dict[str, list[HostCPU]], dict[str, list[HostCPU]]]:
    """Return ({normalized full name: CPUs}, {model number: CPUs})."""
    full: dict[str, list[HostCPU]] = {}
    number: dict[str, list[HostCPU]] = {}
    for cpu in host_catalogue():
        names = (cpu.name, *cpu.aliases)
        for named, keys in ((full, map(normalised_host, names)), (number, map(_number, names))):
            for key in set(keys):
                named.setdefault(key, []).append(cpu)
    return full, number


def _number(name: str) -> str:
    """Return a CPU name without its family, because people write 13900K, 5950X and 8480+."""
    return re.sub(r"^i\d(?=\d{4})", "", normalised_host(_FAMILY.sub(" ", name.casefold())))


def _read(text: str) -> Iterator[HostCPU]:
    data: dict[str, Any] = tomllib.loads(text)
    sources, cores = data["sources"], data["core"]

    def figure(points: float, source: str) -> Figure:
        return Figure(value=points, source=sources[source]["title"], kind=sources[source]["kind"])

    for core, about in cores.items():
        like = cores[about.get("like", core)]
        per_ghz = statistics.median(
            cpu["points"] / cpu["turbo_ghz"] for cpu in like["measured"]
        ) * about.get("times", 1.0)
        for kind in HOST_KINDS:
            for cpu in about.get(kind, ()):
                points = (
                    figure(cpu["points"], cpu["source"])
                    if "points" in cpu
                    else figure(per_ghz * cpu["turbo_ghz"], "clock")
                )
                yield HostCPU(
                    name=cpu["name"],
                    vendor=about["vendor"],
                    core=core,
                    kind=kind,
                    year=cpu["year"],
                    single_thread=points,
                    turbo_ghz=cpu["turbo_ghz"],
                    rough="like" in about,
                    aliases=tuple(cpu.get("aliases", ())),
                )
