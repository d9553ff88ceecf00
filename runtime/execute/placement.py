"""Where the scheduler's process runs beside its GPU, and how torch's allocator is set up. Call before CUDA starts."""

from __future__ import annotations

import os
from pathlib import Path

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
ALLOCATOR_TOO = "PYTORCH_ALLOC_CONF"  # its name in newer versions of torch


def set_allocator() -> None:
    """Let torch grow its segments in place (less fragmentation), unless the user chose otherwise."""
    if ALLOCATOR_TOO not in os.environ:
        os.environ.setdefault(ALLOCATOR, "expandable_segments:True")


def bind_to_socket(pci_bus_id: str, sysfs: Path = Path("/sys")) -> frozenset[int]:
    """Bind this process to the CPUs of the socket that holds the GPU. Returns them; empty if nothing was done.

    `pci_bus_id` is like 0000:3b:00.0. Nothing is done where the system has one node, does not say, or allows this
    process none of the node's CPUs.
    """
    cpus = socket_cpus(pci_bus_id, sysfs)
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return frozenset()
    usable = cpus & os.sched_getaffinity(0)
    if usable:
        os.sched_setaffinity(0, usable)
    return frozenset(usable)


def socket_cpus(pci_bus_id: str, sysfs: Path) -> frozenset[int]:
    """CPUs of the node the PCI device hangs on; empty where the system does not say."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci_bus_id.lower() / "numa_node").read_text())
        if node < 0:
            return frozenset()
        return parse_cpus((sysfs / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
