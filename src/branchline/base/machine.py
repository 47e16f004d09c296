"""What this machine offers to this process: CPUs, memory, instruction sets. Read once, at start.

Knows: /proc, affinity masks and control groups of Linux. Refuses to know: what anyone does with it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

INTERESTING_FLAGS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8",
    "amx_bf16", "asimd", "asimddp", "i8mm", "sve",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cpu_model: str
    cpus: int
    """CPUs this process may use: affinity mask and cgroup quota."""
    memory_bytes: int
    """Memory of the machine or of the control group, whichever is less."""
    available_bytes: int
    """What can be allocated now without swapping."""
    flags: tuple[str, ...]
    """Instruction set extensions that matter to inference."""

    @classmethod
    def look(cls, root: Path = Path("/")) -> "Machine":
        """Look at the machine. Files that are missing are skipped; ``root`` is for tests."""
        cpuinfo = _fields(root / "proc/cpuinfo")
        meminfo = _fields(root / "proc/meminfo")
        total, available = _kib(meminfo.get("MemTotal")), _kib(meminfo.get("MemAvailable"))
        limit, used = _cgroup_memory(root / "sys/fs/cgroup")
        if limit is not None:
            total = min(total, limit) if total else limit
            available = min(available, max(0, limit - used)) if available else max(0, limit - used)
        present = set(cpuinfo.get("flags", cpuinfo.get("Features", "")).split())
        return cls(
            cpu_model=cpuinfo.get("model name", "unknown"),
            cpus=_usable_cpus(root / "sys/fs/cgroup/cpu.max"),
            memory_bytes=total,
            available_bytes=available,
            flags=tuple(flag for flag in INTERESTING_FLAGS if flag in present),
        )


def _usable_cpus(quota_file: Path) -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text(quota_file).partition(" ")
    if quota.isdigit() and period.strip().isdigit() and int(period) > 0:
        count = min(count, max(1, int(quota) // int(period)))
    return count


def _cgroup_memory(folder: Path) -> tuple[int | None, int]:
    """Limit and use in bytes, control groups of version 2 or 1."""
    for limit_name, use_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _text(folder / limit_name), _text(folder / use_name)
        if limit.isdigit() and int(limit) < 1 << 60:  # version 1 writes a huge number for "no limit"
            return int(limit), int(used) if used.isdigit() else 0
    return None, 0


def _fields(path: Path) -> dict[str, str]:
    """``name : value`` lines; of several with one name the first."""
    fields: dict[str, str] = {}
    for line in _text(path).splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _kib(text: str | None) -> int:
    number = (text or "0").split()[0]
    return int(number) * 1024 if number.isdigit() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
