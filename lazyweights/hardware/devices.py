"""Machines that run language models: memory, bandwidth, and where these figures come from.

Bandwidth is that of the memory as published (or published transfer rate times published bus width); no program reaches it.
Energy per byte is an assumption for the kind of memory, the same for all devices with that kind.
"""

from __future__ import annotations

from dataclasses import dataclass

from lazyweights.errors import LazyWeightsError

DRAM_PJ_PER_BYTE = {"LPDDR4": 40.0, "LPDDR5": 32.0, "GDDR6": 60.0, "GDDR7": 50.0}
"""Assumption: picojoules to read a byte from DRAM, device and interface, by kind of memory (4 to 7.5 pJ a bit)."""


@dataclass(frozen=True)
class Device:
    """A machine.

    Attributes
    ----------
    key : str
        Name for ``--device``.
    label : str
    kind : str
        ``board``, ``laptop``, ``phone`` or ``desktop``.
    bandwidth : float
        Peak bytes per second of the memory that holds the weights.
    memory_bytes : float
        Its size; of the largest configuration where there are several.
    memory_kind : str
        Key of `DRAM_PJ_PER_BYTE`.
    source : str
        Where bandwidth and size were published.
    """

    key: str
    label: str
    kind: str
    bandwidth: float
    memory_bytes: float
    memory_kind: str
    source: str

    @property
    def dram_pj_per_byte(self) -> float:
        """Picojoules a byte (assumption)."""
        return DRAM_PJ_PER_BYTE[self.memory_kind]


def _device(key: str, label: str, kind: str, gb_per_s: float, gb: float, memory: str, source: str) -> Device:
    return Device(key, label, kind, gb_per_s * 1e9, gb * 1e9, memory, source)


_ALL = (
    _device("orin-nano-super", "Jetson Orin Nano Super", "board", 102, 8, "LPDDR5", "NVIDIA, Jetson Orin Nano Super data sheet"),
    _device("jetson-nano", "Jetson Nano", "board", 25.6, 4, "LPDDR4", "NVIDIA, Jetson Nano data sheet"),
    _device("agx-orin-64", "Jetson AGX Orin 64GB", "board", 204.8, 64, "LPDDR5", "NVIDIA, Jetson AGX Orin data sheet"),
    _device("raspberry-pi-5", "Raspberry Pi 5", "board", 17.1, 16, "LPDDR4",
            "Raspberry Pi 5 product brief: LPDDR4X-4267, 32 bits wide (4.267 GT/s x 4 B)"),
    _device("dgx-spark", "NVIDIA DGX Spark", "desktop", 273, 128, "LPDDR5", "NVIDIA, DGX Spark specifications"),
    _device("macbook-m1", "MacBook Air, M1", "laptop", 68.25, 16, "LPDDR4",
            "Apple, M1: LPDDR4X-4266, 128 bits wide (4.266 GT/s x 16 B)"),
    _device("macbook-m2", "MacBook Air, M2", "laptop", 100, 24, "LPDDR5", "Apple, M2 announcement (June 2022)"),
    _device("macbook-m4", "MacBook Air, M4", "laptop", 120, 32, "LPDDR5", "Apple, MacBook Air (M4) technical specifications"),
    _device("macbook-m4-pro", "MacBook Pro, M4 Pro", "laptop", 273, 48, "LPDDR5",
            "Apple, MacBook Pro (M4) technical specifications"),
    _device("macbook-m4-max", "MacBook Pro, M4 Max, 40-core GPU", "laptop", 546, 128, "LPDDR5",
            "Apple, MacBook Pro (M4) technical specifications"),
    _device("ryzen-ai-max-395", "Ryzen AI Max+ 395", "laptop", 256, 128, "LPDDR5",
            "AMD, Ryzen AI Max+ 395 specifications: LPDDR5X-8000, 256 bits wide"),
    _device("core-ultra-200v", "Core Ultra 200V", "laptop", 136.5, 32, "LPDDR5",
            "Intel ARK, Core Ultra 9 288V: LPDDR5X-8533, 128 bits wide"),
    _device("snapdragon-x-elite", "Snapdragon X Elite", "laptop", 135, 64, "LPDDR5",
            "Qualcomm, Snapdragon X Elite product brief"),
    _device("snapdragon-8-gen-3", "phone with Snapdragon 8 Gen 3", "phone", 76.8, 24, "LPDDR5",
            "Qualcomm, Snapdragon 8 Gen 3 product brief: LPDDR5X at 4800 MHz, 4 x 16 bits"),
    _device("snapdragon-8-elite", "phone with Snapdragon 8 Elite", "phone", 84.8, 24, "LPDDR5",
            "Qualcomm, Snapdragon 8 Elite product brief: LPDDR5X at 5300 MHz, 4 x 16 bits"),
    _device("rtx-3060", "GeForce RTX 3060 12GB", "desktop", 360, 12, "GDDR6", "NVIDIA: GDDR6 at 15 Gb/s, 192 bits wide"),
    _device("rtx-4060", "GeForce RTX 4060", "desktop", 272, 8, "GDDR6", "NVIDIA, GeForce RTX 4060 specifications"),
    _device("rtx-3090", "GeForce RTX 3090", "desktop", 936, 24, "GDDR6", "NVIDIA: GDDR6X at 19.5 Gb/s, 384 bits wide"),
    _device("rtx-4090", "GeForce RTX 4090", "desktop", 1008, 24, "GDDR6", "NVIDIA: GDDR6X at 21 Gb/s, 384 bits wide"),
    _device("rtx-5090", "GeForce RTX 5090", "desktop", 1792, 32, "GDDR7", "NVIDIA: GDDR7 at 28 Gb/s, 512 bits wide"),
    _device("rx-7900-xtx", "Radeon RX 7900 XTX", "desktop", 960, 24, "GDDR6", "AMD: GDDR6 at 20 Gb/s, 384 bits wide"),
)  # fmt: skip

DEVICES = {device.key: device for device in _ALL}
"""Known machines by key."""


def find_device(key: str) -> Device:
    """Return a device by its key.

    Raises
    ------
    LazyWeightsError
        If there is none; the message lists those there are.
    """
    if key not in DEVICES:
        raise LazyWeightsError(f"there is no device {key!r}; there are {', '.join(DEVICES)}")
    return DEVICES[key]
