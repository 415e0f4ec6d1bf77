"""Precision of a DeepSpeed file: what it trains in, and in which type gradients travel."""

from __future__ import annotations

from typing import Any

from scaling.deepspeed_file.sections import AUTO, section, settings_stage, shown, switched_on

# What DeepSpeed's DtypeEnum accepts for each of our names.
TYPE_NAMES = {
    "fp16": ("fp16", "float16", "half", "torch.float16"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp32": ("fp32", "float32", "float", "torch.float32"),
}
AUTOCAST_NAMES = {"fp16": "float16", "bf16": "bfloat16"}
HALF = ("bf16", "fp16")
OLD_BF16 = "bfloat16"
TRAVEL_TYPES = ("fp32", "fp16", "bf16")


def fill_precision(settings: dict[str, Any], name: str) -> None:
    """Fill "auto" from `precision.name`. Raises ValueError where the file trains in another precision than that."""
    if section(settings, "bf16") and section(settings, OLD_BF16):
        raise ValueError("bf16 and bfloat16 are the same section by its new and its old name; keep bf16 only")
    for key, half in (("fp16", "fp16"), ("bf16", "bf16"), (OLD_BF16, "bf16")):
        if section(settings, key).get("enabled") == AUTO:
            settings[key]["enabled"] = name == half
    _fill_autocast(settings, name)
    claims = _claims(settings)
    if len(claims) > 1:
        raise ValueError(f"{' and '.join(claims)} are both on; a run has one precision: keep precision={name}'s")
    found = next(iter(claims.values()), "fp32")
    wanted = name if name in HALF else "fp32"
    if found != wanted:
        raise ValueError(_disagreement(found, name, next(iter(claims), None)))


def refuse_accumulation(settings: dict[str, Any]) -> None:
    """Raise ValueError for accumulation in another type than that of half-precision weights, without ZeRO."""
    kind = section(settings, "data_types").get("grad_accum_dtype")
    half = next((name for name in (*HALF, OLD_BF16) if switched_on(settings, name)), None)
    if kind is None or half is None or settings_stage(settings) > 0:
        return
    own = "bf16" if half == OLD_BF16 else half
    if kind not in TYPE_NAMES[own]:
        raise ValueError(
            f"data_types.grad_accum_dtype={shown(kind)} with {half} and no ZeRO: DeepSpeed has that from stage 1 on; "
            "leave it out, or set zero_optimization.stage"
        )


def trained_in(settings: dict[str, Any]) -> str:
    """bf16, fp16 or fp32: what a reconciled file trains in, by type or by autocast."""
    return next(iter(_claims(settings).values()), "fp32")


def fill_communication_type(settings: dict[str, Any], reduce: str) -> None:
    """Fill "auto" from `precision.reduce`. Raises ValueError where the file names another type than that."""
    value = settings.get("communication_data_type")
    if value is None:
        return
    if value == AUTO:
        settings["communication_data_type"] = reduce
        return
    if not isinstance(value, str) or value.lower() not in TRAVEL_TYPES:
        raise ValueError(f'communication_data_type={shown(value)}: must be one of {", ".join(TRAVEL_TYPES)}, or "auto"')
    if (name := value.lower()) == reduce:
        return
    ours = f"start with precision.reduce={name}, or " if name != "fp16" else ""
    raise ValueError(
        f"communication_data_type={shown(value)} but precision.reduce={reduce}; "
        f'{ours}write "{reduce}" or "auto" into the file'
    )


def _fill_autocast(settings: dict[str, Any], name: str) -> None:
    """Autocast takes the precision only where neither type claims it."""
    autocast = section(settings, "torch_autocast")
    if autocast.get("enabled") == AUTO:
        claimed = any(section(settings, key).get("enabled") is True for key in ("fp16", "bf16", OLD_BF16))
        settings["torch_autocast"]["enabled"] = name in HALF and not claimed
    if autocast.get("dtype") == AUTO and name in HALF:
        settings["torch_autocast"]["dtype"] = AUTOCAST_NAMES[name]


def _claims(settings: dict[str, Any]) -> dict[str, str]:
    """The switches that are on, and the precision that each of them means."""
    claims = {f"{key}.enabled": key for key in ("fp16", "bf16") if switched_on(settings, key)}
    if switched_on(settings, OLD_BF16):
        claims[f"{OLD_BF16}.enabled"] = "bf16"
    if switched_on(settings, "torch_autocast"):
        claims["torch_autocast.enabled"] = _autocast_type(section(settings, "torch_autocast").get("dtype"))
    return claims


def _autocast_type(value: object) -> str:
    for name in HALF:
        if value in TYPE_NAMES[name]:
            return name
    raise ValueError(f'torch_autocast.dtype={shown(value)}: must be "bfloat16" or "float16"')


def _disagreement(found: str, name: str, switch: str | None) -> str:
    if switch is None:
        return (
            f"trains in fp32 (no precision is switched on in it), but precision={name} was asked for; "
            f'write "{name}": {{"enabled": true}} into it, or start with precision=fp32'
        )
    instead = f"set {switch} to false"
    if name in HALF:
        instead += f' and write "{name}": {{"enabled": true}}'
    return (
        f"trains in {found} ({switch} is on), but precision={name} was asked for; "
        f"start with precision={found}, or {instead}"
    )
