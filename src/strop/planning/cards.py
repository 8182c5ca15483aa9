"""Peak rates of graphics cards, which MFU divides by."""

from __future__ import annotations

import re

# (pattern of the name that torch gives, dense bfloat16, float32 outside of tensor cores), TFLOP/s of one card. The
# first pattern that is found counts.
_CARDS: tuple[tuple[str, float, float], ...] = (
    (r"GB200", 2500, 80),
    (r"B200", 2250, 75),
    (r"GH200", 989.4, 66.9),
    (r"H[12]00 NVL", 835.5, 60),
    (r"H200", 989.4, 66.9),
    (r"H100 PCIe", 756, 51.2),
    (r"H100", 989.4, 66.9),
    (r"A100", 312, 19.5),
    (r"A40", 149.7, 37.4),
    (r"A10", 125, 31.2),
    (r"L40S", 362.05, 91.6),
    (r"L40", 181.05, 90.5),
    (r"RTX A6000", 154.8, 38.7),
    (r"RTX 5090", 209.5, 104.8),
    (r"RTX 4090", 165.2, 82.6),
    (r"RTX 3090", 71, 35.6),
    (r"MI3(00|25)X", 1307.4, 163.4),
)
# Cut-down chips, and parts of a chip, under the name of the whole.
_OTHERS = re.compile(r"\b(Laptop|Max-Q|Mobile|MIG|vGPU|GRID)\b|(?<=\d)0 (D|Ti)\b")


def peak_rate(card: str, dtype: str) -> float | None:
    """FLOP/s that one card can do at most in dense matrix products; None of a card or number format that is not known.

    Args:
        card: its name as torch gives it. dtype: "bfloat16", with sums in float32, or "float32", without TF32, which
            torch leaves off.

    Source: the makers' data sheets and architecture white papers (NVIDIA A100, A10, A40, L40, L40S, H100, H100 NVL,
    H200, DGX and HGX B200, GB200 NVL72; GA102, AD102 and GB202 for the GeForce and RTX cards; AMD CDNA 3). Where they
    give the rate with sparsity, this is half of it.
    """
    if _OTHERS.search(card):
        return None
    for pattern, bfloat16, float32 in _CARDS:
        if re.search(rf"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9])", card):
            return {"bfloat16": bfloat16, "float32": float32}.get(dtype, 0.0) * 1e12 or None
    return None
