"""What a rank's memory is held for, in bytes per parameter: how ZeRO's papers count."""

from __future__ import annotations

from typing import Any

TERMS = ("model", "gradients", "optimizer")


def bytes_per_parameter(summary: dict[str, Any]) -> dict[str, float | None]:
    """Divide each term that grows with the model by all parameters, whole; None where it was not measured."""
    held, parameters = summary["memory_terms_gib"] or {}, summary["parameters"]
    return {
        term: None if held.get(term) is None or parameters < 1 else held[term] * 2**30 / parameters for term in TERMS
    }
