"""What well-known devices can do at most: dense matrix products, from their makers' data sheets, in operations a second.

For the share of a device's peak that training reaches. A device that is not listed has no share; nothing is guessed.
"""

from __future__ import annotations

import re

__all__ = ["peak_flops"]

#: name: (fp32, fp16 and bf16). fp32 is without TF32, which torch leaves off for matrix products. Order matters: longest first.
_PEAKS: tuple[tuple[str, float | None, float | None], ...] = (
    (r"\bH200\b|\bH100 80GB HBM3\b|\bH100 SXM", 66.9e12, 989.5e12),
    (r"\bH100 PCIe\b", 51.2e12, 756e12),
    (r"\bH100 NVL\b", 60e12, 835e12),
    (r"\bA100\b", 19.5e12, 312e12),
    (r"\bL40S\b", 91.6e12, 362e12),
    (r"\bL4\b", 30.3e12, 121e12),
    (r"\bA10\b", 31.2e12, 125e12),
    (r"\bV100\b", 15.7e12, 125e12),
    (r"\bT4\b", 8.1e12, 65e12),
    (r"\bP100\b", 9.3e12, 18.7e12),
    (r"\bRTX 4090\b", 82.6e12, 165.2e12),
    (r"\bRTX 3090\b", 35.6e12, 71e12),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return a device's peak for "fp32", "fp16" or "bf16"; None where it is not known, or for other precisions."""
    if precision not in ("fp32", "fp16", "bf16"):
        return None
    for pattern, single, half in _PEAKS:
        if re.search(pattern, device_name):
            return single if precision == "fp32" else half
    return None
