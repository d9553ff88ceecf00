"""How large the KV pool may be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from runtime.config import EngineConfig
from runtime.errors import ModelLoadError

CPU_POOL_BYTES = 4 << 30  # the default pool on a CPU never takes more; --max-total-tokens lifts it
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Pages of the pool, and one clause on where the number comes from."""

    n_pages: int
    why: str


def size_pool(
    config: EngineConfig, bytes_per_token: int, free_bytes: int, *, cap_bytes: int | None, fraction: float = 0.5
) -> PoolSize:
    """As asked for, else `mem_fraction` (`fraction` where none is given) of the free memory, at most `cap_bytes`.

    Raises ModelLoadError if what was asked for does not fit, or what is free holds not one page.
    """
    fraction = fraction if config.mem_fraction is None else config.mem_fraction
    page_bytes = bytes_per_token * config.page_size
    if config.kv_pool_tokens is not None:
        n_pages = max(1, config.kv_pool_tokens // config.page_size)
        if n_pages * page_bytes > free_bytes:
            raise ModelLoadError(
                f"A KV pool of {config.kv_pool_tokens} tokens takes {n_pages * page_bytes / GIB:.1f} GiB; "
                f"{free_bytes / GIB:.1f} GiB are free."
            )
        return PoolSize(n_pages, f"{n_pages * config.page_size} KV tokens as asked for")
    budget, reason = (
        int(free_bytes * fraction),
        f"{fraction:.0%} of {free_bytes / GIB:.1f} GiB free",
    )
    if cap_bytes is not None and budget > cap_bytes:
        budget, reason = cap_bytes, f"the default limit of {cap_bytes / GIB:.0f} GiB on a CPU"
    n_pages = budget // page_bytes
    if n_pages < 1:
        raise ModelLoadError(
            f"One KV page takes {page_bytes} bytes and {reason} is {budget}: there is no room for a KV pool."
        )
    return PoolSize(n_pages, f"{n_pages * config.page_size} KV tokens ({n_pages * page_bytes / GIB:.1f} GiB, {reason})")


def free_host_bytes() -> int:
    """Memory this process may still take: what the system calls available, or less in a limited cgroup."""
    return min(_available_bytes(), _cgroup_left())


def _available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_left(root: Path = Path("/sys/fs/cgroup")) -> int:
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit != "max":
            return max(0, int(limit) - int((root / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no cgroup limit to read
    return 1 << 62
