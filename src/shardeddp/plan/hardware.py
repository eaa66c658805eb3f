"""Hardware: dense peaks, memory and links of GPUs, and the machines that a plan is for."""

import re
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

from shardeddp.errors import UsageError, closest, did_you_mean

GIB = 1 << 30


@dataclass(frozen=True)
class GPU:
    """Data sheet of a GPU; peaks are dense, without structured sparsity."""

    name: str
    bf16_tflops: float
    """Dense bf16 peak; the fp16 peak for GPUs without bf16."""
    fp32_tflops: float
    """Peak of fp32 matmuls without TF32, torch's default."""
    memory_gb: float
    """Memory that torch finds, in 10**9 bytes; the name's figure where nobody has reported it."""
    memory_tbs: float
    link_gbs: float
    """Bandwidth to the other GPUs of the node in GB/s, one direction."""
    best: float
    """Fraction of the dense peak that the fastest matmul of any shape reaches."""
    network_gbits: float = 200.0
    """Inter-node bandwidth per GPU of the vendor's reference machine, in Gbit/s."""
    has_bf16: bool = True


FIGURES = tuple(it.name for it in fields(GPU) if it.name not in ("name", "has_bf16"))


def _check_figure(name: str, figure: Any) -> None:
    if type(figure) not in (int, float) or not 0 < figure < inf:
        raise UsageError(f"{name}={figure!r}: expected a number above 0")


# Peaks, memory, links: the vendors' data sheets (A100 2021, H100 2023, H200 2024, Blackwell 2024,
# MI300X 2023), where figures "with sparsity" are halved and NVLink's are halved to one direction.
# H100 NVL is 835 dense (1,671 with sparsity). `best`: maximum achievable matmul FLOPS of
# stas00/ml-engineering (compute/accelerator), which measured shapes of all sizes; without a
# measurement the figure of the nearest relative. Network: DGX-1 to DGX B300 and their PCIe relatives,
# OAM platforms of AMD. Memory of A100 and H100: what torch finds (39.4, 79.1 and 95.0 GiB, of its
# errors out of memory), which is more than the 40, 80 and 96 GB of the names. MI250X: one of its two
# dies, each of which torch shows as a device.
_TABLE = (
    # name, bf16, fp32, GB, TB/s, GB/s, best, Gbit/s
    ("V100", 125, 15.7, 32, 0.9, 150, 0.80, 100),
    ("A100-40", 312, 19.5, 42.3, 1.555, 300, 0.87, 200),
    ("A100-80", 312, 19.5, 84.9, 2.039, 300, 0.87, 200),
    ("A100-PCIE", 312, 19.5, 84.9, 1.935, 32, 0.81, 100),
    ("H100-80", 989, 67, 84.9, 3.35, 450, 0.80, 400),
    ("H100-PCIE", 756, 51, 84.9, 2.0, 64, 0.80, 200),
    ("H100-NVL", 835, 60, 94, 3.9, 300, 0.80, 200),
    ("H100-96-500W", 989, 67, 102.0, 2.4, 450, 0.70, 400),
    ("H200", 989, 67, 141, 4.8, 450, 0.80, 400),
    ("GH200", 989, 67, 96, 4.0, 450, 0.84, 400),
    ("H20", 148, 44, 96, 4.0, 450, 0.90, 400),
    ("B200", 2250, 80, 180, 7.7, 900, 0.776, 400),
    ("GB200", 2500, 80, 186, 8.0, 900, 0.73, 400),
    ("B300", 2250, 77, 270, 8.0, 900, 0.786, 800),
    ("GB300", 2500, 80, 279, 8.0, 900, 0.73, 800),
    ("L40S", 362, 91.6, 48, 0.864, 32, 0.75, 100),
    ("MI250X", 191.5, 23.9, 64, 1.6, 150, 0.60, 200),
    ("MI300X", 1307, 163.4, 192, 5.3, 448, 0.51, 400),
    ("MI325X", 1307, 163.4, 256, 6.0, 448, 0.60, 400),
    ("MI355X", 2300, 157.3, 288, 8.0, 538, 0.68, 400),
)
_WITHOUT_BF16 = ("V100",)
GPUS = {row[0]: GPU(*row, has_bf16=row[0] not in _WITHOUT_BF16) for row in _TABLE}
_ALIASES = {"A100": "A100-80", "H100": "H100-80", "A100-SXM": "A100-80", "H100-SXM": "H100-80"}


def name_of_gpu(name: str) -> str:
    """Normalize the name of a GPU to its key in ``GPUS``; unknown names become upper case."""
    key = name.upper().replace(" ", "-").removeprefix("NVIDIA-").removesuffix("GB")
    return _ALIASES.get(key, key)


def find_gpu(name: str, **figures: float | None) -> GPU:
    """Return a GPU by name, or by its figures.

    Args:
        name: Name in ``GPUS``, case-insensitive; any name if all figures are given.
        **figures: Fields of :class:`GPU` that override the table; None keeps the table's value.

    Raises:
        UsageError: The GPU is not in the table, and figures are missing.
    """
    given = {key: value for key, value in figures.items() if value is not None}
    for figure, value in given.items():
        if figure not in FIGURES:
            raise UsageError(f"{figure!r} is no figure of a GPU; expected {', '.join(FIGURES)}")
        _check_figure(f"{name}: {figure}", value)
    key = name_of_gpu(name)
    found = GPUS.get(key)
    if found is not None:
        return replace(found, **given)
    needs = ("bf16_tflops", "memory_gb", "memory_tbs", "link_gbs")
    missing = [need for need in needs if need not in given]
    if missing:
        hint = did_you_mean(closest(key, (*GPUS, *_ALIASES), cutoff=0.4))
        raise UsageError(
            f"GPU {name!r} is not in the table ({', '.join(GPUS)}){hint or '.'} For another GPU also "
            f"give {', '.join('--' + need.replace('_', '-') for need in missing)} (from Python: "
            f"gpu_figures={{{missing[0]!r}: ...}})"
        )
    own: dict[str, Any] = {"best": 0.75, "fp32_tflops": given["bf16_tflops"] / 16, **given}
    return GPU(name, **own)


def gpu_of_device(name: str, memory_nbytes: int) -> str | None:
    """Return the key in ``GPUS`` for a driver's device name, such as ``NVIDIA H100 80GB HBM3``.

    Returns None if the table does not have the device, or if it is a part of one: it has a part of
    the peaks (MIG), or of the time (vGPU, ``GRID A100-10C``).
    """
    words = re.split(r"[^A-Z0-9]+", name.upper())
    if "MIG" in words or "GRID" in words or re.fullmatch(r"\d+[ABCQ]", words[-1]):
        return None
    pcie = {"PCIE", "NVL"} & set(words)
    for word in words:
        family = [key for key in GPUS if key == word or key.startswith(f"{word}-")]
        if word and pcie and f"{word}-{min(pcie)}" in GPUS:
            family = [f"{word}-{min(pcie)}"]
        if family:
            # Among variants, the one with the nearest memory size.
            nearest = min(family, key=lambda it: abs(GPUS[it].memory_gb * 1e9 - memory_nbytes))
            is_whole = memory_nbytes > _LEAST_OF_WHOLE * GPUS[nearest].memory_gb * 1e9
            return nearest if is_whole else None
    return None


_LEAST_OF_WHOLE = 0.45
"""Least memory of a whole GPU, as a fraction of the table's: there are V100 with 16 GB."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines of a run."""

    gpu: GPU
    count: int
    per_node: int = 8
    network_gbits: float | None = None
    """Inter-node bandwidth per GPU in Gbit/s; None: a fraction of the reference machine's."""

    def __post_init__(self) -> None:
        if any(type(it) is not int or it < 1 for it in (self.count, self.per_node)):
            raise UsageError(
                f"expected whole numbers of GPUs, at least one on a node, found {self.count!r} GPUs at "
                f"{self.per_node!r}"
            )
        if self.network_gbits is not None:
            _check_figure("network_gbits", self.network_gbits)
        if self.count > self.per_node and self.count % self.per_node:
            raise UsageError(
                f"{self.count} GPUs at {self.per_node} on a node leave a node that is not full: "
                f"every node needs the same number of ranks"
            )

    @property
    def ranks_per_node(self) -> int:
        """Number of GPUs in use per node."""
        return min(self.count, self.per_node)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.count // self.ranks_per_node
