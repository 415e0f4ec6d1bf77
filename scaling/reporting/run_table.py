"""The summary of one run as a person reads it."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from scaling.analysis.memory import TERMS, bytes_per_parameter
from scaling.analysis.traffic import differing, surprise
from scaling.reporting.columns import megabytes, milliseconds, number, percent, setting
from scaling.reporting.memory_table import REST, beside

# What each flag means for the number beside it.
FLAGS = {
    "unsteady": "step times vary by more than 10 %",
    "drift": "the second half of the window is more than 2 % off the first",
    "few_samples": "fewer than 20 steps or 4 blocks: the interval says little",
    "data_bound": "more than 5 % of the window went into waiting for data",
    "host_bound": "the device ran dry between blocks: the host issues work too slowly",
    "oversubscribed": "more busy threads than cores: ranks take turns, no efficiency is computed",
    "disturbed": "other programs took more than 5 % of the window from a rank's cores: no efficiency is computed",
    "skipped_steps": "loss scaling left steps out",
    "nonfinite_loss": "the loss became infinite or NaN",
    "varying_shapes": "input shapes changed while compilation or kernel search was on",
    "throttled": "a device slowed down for heat, for its own protection, or by an external brake",
    "clock_changed": "a device's clock differs by more than 2 % between the halves of the window",
    "power_limited": "a device's power limit is below its default",
    "unreadable_samples": "some samples could not be read, and neighbours took their places (environment.json)",
    "mixed_devices": "the ranks run on different device models",
    "not_counted": "the untimed step that counts what is sent did not fit into memory: nobody checked the gradients",
    "gradients_not_reduced": "the gradients were not averaged over ranks: this is not data-parallel training",
    "parameters_disagree": "the ranks hold different weights: this is not data-parallel training",
    "unexpected_communication": "what was sent is not what this strategy should send: see comm_notes",
    "sync_each_step": "host and device waited for each other at every step: no efficiency is computed",
    "profiled": "a profiler ran inside the window and slowed it down: no efficiency is computed",
}


UNFOLDED = 1000  # a file and a filter have no edge to fold at


def print_run(summary: dict[str, Any], console: Console | None = None) -> None:
    """A two-column table on standard output, flags below it."""
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else UNFOLDED)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(summary):
        table.add_row(name, value)
    with console.capture() as capture:
        console.print(table)
    console.out("\n".join(line.rstrip() for line in capture.get().splitlines()), highlight=False)
    for flag in summary["flags"]:
        console.print(f"! {flag}: {FLAGS.get(flag, 'see the documentation')}", style="yellow", markup=False)


def _rows(s: dict[str, Any]) -> list[tuple[str, str]]:
    time = s["step_time_s"]
    spread = "" if time["ci95"] is None else " (95 %)"
    batch = f"{s['micro_batch_size']} x {s['accumulation_steps']} x {s['world_size']}"
    warm = f"{s['warmup_steps']} warm-up steps before"
    rows = [
        ("run", f"{s['model']}, {s['strategy']}, {setting(s)}"),
        ("devices", _devices(s)),
        ("batch", f"{batch} = {s['global_batch_size']} samples per step (micro x accumulation x ranks)"),
        (
            "step time",
            f"{milliseconds(time)} ms{spread}, median {number(time['median'] * 1e3)}, p95 {number(time['p95'] * 1e3)}",
        ),
        ("measured", f"{s['measured_steps']} steps in {time['blocks']} blocks, {s['window_s']:.2f} s; {warm}"),
        ("samples/s", f"{s['samples_per_s']:,.2f}, per device {s['samples_per_s_per_device']:,.2f}"),
    ]
    if s["tokens_per_s"] is not None:
        targets = s["target_tokens_per_s"]
        in_loss = "" if targets is None else f", in the loss {targets:,.0f}"
        padding = ", padding included" if s["data"] == "text-mixed" else ""
        rows.append(("tokens/s", f"{s['tokens_per_s']:,.0f}{padding}{in_loss}"))
    if s["tflops_per_device"] is not None:
        rows.append(
            ("TFLOPS/device", f"{s['tflops_per_device']:.4g} ({number(s['flops_per_step'] / 1e9)} GFLOP per step)")
        )
    rows += _limits(s)
    rows += _memory(s["peak_memory_gib"]) + _held(s)
    if (s["disturbed_s"] or 0) > 0.01 * s["window_s"]:
        rows.append(
            ("other programs", f"took {s['disturbed_s'] / s['window_s']:.1%} of the window from a rank's cores")
        )
    rows.append(("waiting for data", f"{s['data_wait_s'] / s['window_s']:.2%} of the window"))
    rows += _communication(s) if s["world_size"] > 1 else []
    rows.append(("loss", f"{_number(s['loss']['first'])} -> {_number(s['loss']['last'])}"))
    return rows


def _limits(s: dict[str, Any]) -> list[tuple[str, str]]:
    """How far the rate is from what the device can do, and what the device did meanwhile; only what was measured."""
    rows = []
    if s["mfu"] is not None:
        recomputed = "" if s["hfu"] == s["mfu"] else f"; HFU {percent(s['hfu'])}, with recomputation"
        rows.append(("MFU", f"{percent(s['mfu'])} of {s['peak_tflops']:.4g} TFLOPS dense{recomputed}"))
    if s["matmul_share"] is not None:
        largest = f"{s['matmul_tflops']:.4g} TFLOPS, the largest matrix-product rate measured on the device"
        rows.append(("share of matmul", f"{percent(s['matmul_share'])} of {largest}"))
    if s["energy_j"] is not None:
        samples = s["samples_per_s"] * s["window_s"]
        rows.append(("energy", f"{number(s['energy_j'] / samples)} J per sample, {number(s['energy_j'])} J in all"))
    if s["clock_mhz"] is not None:
        rows.append(("clock", f"{s['clock_mhz']:.0f} MHz (mean over the window, slowest device)"))
    return rows


def _memory(memory: dict[str, Any]) -> list[tuple[str, str]]:
    if memory["allocated"] is None:
        return []
    held = "" if memory["reserved"] is None else f" allocated, {memory['reserved']:.2f} reserved"
    return [("peak memory", f"{memory['allocated']:.2f} GiB{held} ({memory['kind'].replace('_', ' ')})")]


def _held(s: dict[str, Any]) -> list[tuple[str, str]]:
    """What the memory of the rank that holds most is for, as far as it was told apart."""
    terms, textbook = s["memory_terms_gib"] or {}, s["textbook_bytes_per_parameter"] or {}
    each = bytes_per_parameter(s)
    said = []
    for name in (*TERMS, *REST):
        if terms.get(name) is None or (name in REST and not terms[name]):
            continue
        share = "" if each.get(name) is None else f" ({beside(each[name], textbook.get(name))} B/parameter)"
        said.append(f"{name} {_size(terms[name])}{share}")
    of = " (measured / textbook)" if textbook and said else ""
    return [("memory held", f"{', '.join(said)}{of}")] if said else []


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 1 else f"{1024 * gib:.4g} MiB"


def _communication(s: dict[str, Any]) -> list[tuple[str, str]]:
    """What several ranks sent each other in a step, and what was checked of it."""
    rows = []
    sent, expected = s["comm_bytes_per_step"], s["expected_comm_bytes_per_step"] or {}
    if sent is not None:
        each = ", ".join(f"{kind} {megabytes(value)}" for kind, value in sent.items())
        total = f"{sum(sent.values()) / 1e6:,.2f} MB per rank" + (f" ({each})" if each else "")
        rows.append(("communication", f"{s['syncs_per_step']} gradient reduction(s) per step, {total}"))
        if said := surprise(s):
            named = [kind for kind in differing(s) if kind != "reductions"]
            computed = [f"{s['expected_syncs_per_step']} reduction(s)"] * ("reductions" in differing(s))
            computed += [f"{kind} {megabytes(expected.get(kind, 0.0))} MB" for kind in named]
            rows.append(("expected", f"{', '.join(computed)} ({said})" if computed else said))
    # Of what is sharded every rank holds a part, and gathering makes copies agree whatever happened.
    sharded = " (weights are gathered)" if s["parameters_agree"] is None and s["gather_dtype"] is not None else ""
    agree = f"{_yes(s['parameters_agree'])}{sharded}"
    return [*rows, ("checked", f"gradients reduced: {_yes(s['gradients_reduced'])}, parameters agree: {agree}")]


def _devices(s: dict[str, Any]) -> str:
    if s["peak_memory_gib"]["kind"] != "host_resident":
        return f"{s['world_size']} x {s['device_name']}"
    return f"{s['world_size']} rank(s) on {s['device_name']}, {s['threads']} thread(s) each"


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "NO", None: "not checked"}[value]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
