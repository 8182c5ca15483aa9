"""Answers as JSON that every browser reads, with the tag that saves sending them twice."""

from __future__ import annotations

import json
import math
from typing import Any

import xxhash
from fastapi import Request
from fastapi.responses import Response

FRESH = {"Cache-Control": "no-cache"}
"""A browser may keep an answer, and has to ask whether it still holds."""


def strict(value: Any) -> Any:
    """The same without numbers that JSON does not have: NaN is null, an infinite one the text "inf" or "-inf"."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {str(key): strict(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [strict(one) for one in value]
    return value


def answer(request: Request, value: Any, *, status: int = 200) -> Response:
    """An answer; 304 without a body if the browser has it already."""
    # ASCII: half of a surrogate pair in a completion has no bytes in UTF-8, and an escape in JSON.
    body = json.dumps(strict(value), ensure_ascii=True, allow_nan=False, default=str, separators=(",", ":")).encode()
    tag = f'"{xxhash.xxh3_64_hexdigest(body)}"'
    if status == 200 and tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={**FRESH, "ETag": tag})
    headers = FRESH | ({"ETag": tag} if status == 200 else {})
    return Response(body, status_code=status, media_type="application/json", headers=headers)
