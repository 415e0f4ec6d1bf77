"""Which records can stand in a ratio at all: how a run ended, what its files say, and what no machine produces."""

from __future__ import annotations

from typing import Any

from scaling.results.reader import Run, as_dict, as_list

# Flags after which a step time is not the time of a step of this job alone; all other flags are shown, and judged
# by the reader.
INVALIDATING = {
    "oversubscribed": "oversubscribed",
    "disturbed": "other programs took its cores",
    "profiled": "profiled",
    "sync_each_step": "synchronised after each step",
    "shared_device": "ranks share a device",
    "mixed_devices": "mixed devices",
    "gradients_not_reduced": "gradients were not reduced",
    "parameters_disagree": "parameters differ between ranks",
    "impossible": "impossible",
}

ROUNDING = 1e-9  # of two quotients of equal numbers
# A probe tries a few shapes for a few seconds: what it finds is at most what the device can do, and a model whose
# products are shaped better, on a cooler device, may exceed it by a little. Beyond that FLOPs or seconds are wrong.
MATMUL_SLACK = 0.05


def refusals(run: Run) -> list[str]:
    """Say why this run may stand in no ratio at all; empty where it may."""
    if run.summary is None:
        return [_ending(run)]
    flags = set(run.summary["flags"])
    if run.summary["gradients_reduced"] is False:
        flags.add("gradients_not_reduced")
    if run.summary["parameters_agree"] is False:
        flags.add("parameters_disagree")
    reasons = [text for flag, text in INVALIDATING.items() if flag in flags]
    if len(names := sorted({str(name) for name in as_list(run.environment.get("devices"))})) > 1:
        reasons.append(f"mixed devices: {', '.join(names)}")
    reasons += [f"no readable {name}" for name in missing_files(run)]
    reasons += [*run.doubts, *_other_files(run)]
    return reasons + contradictions(run.summary) + impossible_values(run.summary)


def _ending(run: Run) -> str:
    if run.status == "failed":
        return f"failed: {as_dict(run.error).get('kind', 'error.json is not readable')}"
    return "incomplete" if run.status == "incomplete" else "summary.json is not readable"


def _other_files(run: Run) -> list[str]:
    """Find where config.yaml and environment.json speak of another run than summary.json does."""
    assert run.summary is not None
    said = {
        **{f"batch.{key}": (value, run.summary.get(key)) for key, value in run.group("batch").items()},
        "strategy.name": (run.group("strategy").get("name"), run.summary["strategy"]),
        "precision.name": (run.group("precision").get("name"), run.summary["precision"]),
        "devices": (len(as_list(run.environment.get("devices"))) or None, run.summary["world_size"]),
    }
    return [
        f"{key} {mine} in its files, {other} in its summary"
        for key, (mine, other) in said.items()
        if mine not in (None, other)
    ]


def missing_files(run: Run) -> list[str]:
    """Name the files without which nobody can tell whether a run is comparable."""
    return [name for name, held in (("config.yaml", run.config), ("environment.json", run.environment)) if not held]


def contradictions(summary: dict[str, Any]) -> list[str]:
    """Find numbers of one record that exclude each other, as when one rank's rate stands for the whole job."""
    return _of_rates(summary) + _of_compute(summary) + _of_communication(summary) + _of_memory(summary)


def _of_rates(summary: dict[str, Any]) -> list[str]:
    """Samples, tokens, steps and seconds against each other."""
    micro, steps, world = summary["micro_batch_size"], summary["accumulation_steps"], summary["world_size"]
    total, rate, per_device = (
        summary["global_batch_size"],
        summary["samples_per_s"],
        summary["samples_per_s_per_device"],
    )
    steps_measured, window = summary["measured_steps"], summary["window_s"]
    reasons = []
    if micro * steps * world != total:
        reasons.append(f"global batch {total} is not micro-batch {micro} x accumulation {steps} x {world} ranks")
    if abs(per_device * world - rate) > 0.01 * rate:
        reasons.append(f"samples/s {rate:g} is not {world} x {per_device:g} per device")
    time, tokens, length = summary["step_time_s"], summary["tokens_per_s"], summary["sequence_length"]
    if abs(time["mean"] * steps_measured - window) > 0.01 * window:
        reasons.append(f"step_time_s.mean {time['mean']:g} x {steps_measured} steps is not window_s {window:g}")
    if time["ci95"] is not None and not time["ci95"][0] <= time["mean"] <= time["ci95"][1]:
        reasons.append(f"ci95 {time['ci95']} does not hold the mean {time['mean']:g}")
    if tokens is not None and length is not None and abs(rate * length - tokens) > 0.01 * tokens:
        reasons.append(f"tokens/s {tokens:g} is not {rate:g} samples/s x {length}")
    if abs(total * steps_measured / window - rate) > 0.01 * rate:
        reasons.append(f"samples/s {rate:g} is not {steps_measured} steps x {total} samples / {window:g} s")
    if not 0 <= summary["data_wait_s"] <= window * (1 + ROUNDING):
        reasons.append(f"data_wait_s {summary['data_wait_s']:g} is not within window_s {window:g}")
    if (summary["energy_j"] or 0) < 0:
        reasons.append(f"energy_j {summary['energy_j']:g} is below 0")
    return reasons


def _of_compute(summary: dict[str, Any]) -> list[str]:
    """FLOPs and what they are divided by; recomputation adds to the work of the hardware, never takes from it."""
    reasons = []
    rate, flops = summary["tflops_per_device"], summary["flops_per_step"]
    if None not in (rate, flops):
        given = flops / summary["step_time_s"]["mean"] / summary["world_size"] / 1e12
        if abs(given - rate) > 0.01 * given:
            reasons.append(f"tflops_per_device {rate:g} is not {given:g}, its FLOPs over its time")
    if summary["hfu"] is not None and summary["mfu"] is None:
        reasons.append(f"hfu {summary['hfu']:g} without an mfu")
    for name, key in (("mfu", "peak_tflops"), ("matmul_share", "matmul_tflops")):
        share, most = summary[name], summary[key]
        if None not in (rate, share, most) and abs(share * most - rate) > 0.01 * rate:
            reasons.append(f"{name} {share:g} is not {rate:g} TFLOPS per device / {key} {most:g}")
    for less, more in (("mfu", "hfu"), ("flops_per_step", "hardware_flops_per_step")):
        model, hardware = summary[less], summary[more]
        if None not in (model, hardware) and hardware < model * (1 - ROUNDING):
            reasons.append(f"{more} {hardware:g} is below {less} {model:g}")
    return reasons


def _of_communication(summary: dict[str, Any]) -> list[str]:
    """Reductions against micro-steps, and bytes of which nobody sends fewer than none; counted and expected alike."""
    reasons = []
    most = summary["accumulation_steps"]
    for name in ("syncs_per_step", "expected_syncs_per_step"):
        if summary[name] is not None and not 0 <= summary[name] <= most:
            reasons.append(f"{name} {summary[name]} is not within 0 and accumulation_steps {most}")
    for name in ("comm_bytes_per_step", "expected_comm_bytes_per_step"):
        kinds = (summary[name] or {}).items()
        reasons += [f"{name}.{kind} {value:g} is below 0" for kind, value in kinds if value < 0]
    if (textbook := summary["textbook_comm_bytes_per_step"]) is not None and textbook < 0:
        reasons.append(f"textbook_comm_bytes_per_step {textbook:g} is below 0")
    return reasons


def _of_memory(summary: dict[str, Any]) -> list[str]:
    """Terms of the memory that a rank holds, and what the textbook says of them."""
    return [
        f"{name}.{term} {value:g} is below 0"
        for name in ("memory_terms_gib", "textbook_bytes_per_parameter")
        for term, value in (summary[name] or {}).items()
        if isinstance(value, int | float) and value < 0
    ]


def impossible_values(summary: dict[str, Any]) -> list[str]:
    """Name values that no machine produces; a row with one keeps its data and gets no verdict."""
    reasons = []
    for name in ("mfu", "hfu"):
        if summary[name] is not None and summary[name] > 1:
            reasons.append(f"impossible: {name.upper()} {100 * summary[name]:.1f} % is above 100 %")
    share = summary["matmul_share"]
    convolves = summary["channels_last"] is not None  # Winograd's convolutions compute less than is counted
    if share is not None and share > 1 + MATMUL_SLACK and not convolves:
        reasons.append(
            f"impossible: share of matmul {100 * share:.1f} % is above the rate measured on the device itself"
        )
    communication, exposed = summary["comm_s"], summary["exposed_comm_s"]
    if communication is not None and exposed is not None and exposed > communication:
        reasons.append(f"impossible: exposed_comm_s {exposed:g} is above comm_s {communication:g}")
    return reasons
