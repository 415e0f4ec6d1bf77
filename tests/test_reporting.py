"""What a person sees of one run: progress while it lasts, and the table at its end."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from scaling.measure.statistics import summarise
from scaling.reporting.progress import Progress
from scaling.reporting.run_table import FLAGS, print_run
from scaling.results.record import Step


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_changes_and_leaves_nothing_of_a_longer_one() -> None:
    stream = Terminal()
    progress = Progress(stream)
    progress.update("block 1 of many")
    progress.update("block 2")
    assert stream.getvalue() == "\rblock 1 of many\rblock 2        "
    progress.note("done")
    assert stream.getvalue().endswith("\r       \rdone\n")


def test_without_a_terminal_a_line_comes_now_and_then() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    for block in range(100):
        progress.update(f"block {block}")
    assert stream.getvalue() == "block 0\n"


def test_other_ranks_say_nothing() -> None:
    stream = Terminal()
    progress = Progress(stream, enabled=False)
    progress.update("x")
    progress.note("y")
    progress.clear()
    assert stream.getvalue() == ""


def summary(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": "gpt2",
        "strategy": "ddp",
        "precision": "bf16",
        "data": "synthetic",
        "sequence_length": 1024,
        "compile": False,
        "checkpointing": False,
        "disturbed_s": None,
        "world_size": 8,
        "device_name": "NVIDIA H100 80GB HBM3",
        "threads": 1,
        "micro_batch_size": 4,
        "accumulation_steps": 2,
        "global_batch_size": 64,
        "step_time_s": {
            "mean": 0.1,
            "median": 0.099,
            "p95": 0.11,
            "p99": 0.12,
            "cv": 0.01,
            "ci95": [0.0995, 0.1005],
            "blocks": 6,
        },
        "measured_steps": 60,
        "warmup_steps": 10,
        "window_s": 6.0,
        "samples_per_s": 640.0,
        "samples_per_s_per_device": 80.0,
        "tokens_per_s": 655360.0,
        "target_tokens_per_s": 600000.0,
        "flops_per_step": 56_000_000_000_000,
        "tflops_per_device": 70.0,
        "peak_memory_gib": {"allocated": 10.25, "reserved": 12.5, "kind": "device"},
        "data_wait_s": 0.06,
        "syncs_per_step": 1,
        "comm_bytes_per_step": {"all_reduce": 870_000_000.0},
        "gradients_reduced": True,
        "parameters_agree": True,
        "loss": {"first": 10.5, "last": None},
        "flags": [],
        "parameters": 2**20,
        **dict.fromkeys(
            ("gather_dtype", "memory_terms_gib", "textbook_bytes_per_parameter", "expected_syncs_per_step")
        ),
        **dict.fromkeys(("expected_comm_bytes_per_step", "textbook_comm_bytes_per_step", "comm_notes")),
        **dict.fromkeys(("mfu", "hfu", "peak_tflops", "matmul_share", "matmul_tflops", "energy_j", "clock_mhz")),
    }
    return base | changes


def printed(**changes: Any) -> str:
    console = Console(file=io.StringIO(), width=120, highlight=False)
    with console.capture() as capture:
        print_run(summary(**changes), console)
    return capture.get()


def test_what_tells_two_runs_apart_is_shown() -> None:
    assert "gpt2, ddp, bf16, synthetic data, 1024 tokens\n" in printed()
    images = printed(sequence_length=None, image_size=224, data="images", compile=True, checkpointing=True)
    assert "gpt2, ddp, bf16, images data, 224 px, compile, checkpointing\n" in images
    assert "655,360, padding included, in the loss" in printed(data="text-mixed")


def test_a_step_that_was_not_counted_is_no_communication() -> None:
    text = printed(comm_bytes_per_step=None, syncs_per_step=None, gradients_reduced=None)
    assert "communication" not in text and "gradients reduced: not checked" in text


def test_memory_is_told_apart_with_the_textbook_beside_it() -> None:
    # 2^20 parameters: 1 / 256 GiB are 4 bytes of each, 1 / 128 GiB are 8.
    held = {"model": 1 / 256, "gradients": None, "optimizer": 1 / 128, "activations": 0.5, "gathered": None}
    text = printed(memory_terms_gib=held, textbook_bytes_per_parameter={"model": 4.0, "gradients": 4.0})
    said = "model 4 MiB (4.00 / 4 B/parameter), optimizer 8 MiB (8.00 B/parameter), activations 512 MiB"
    assert f"{said} (measured / textbook)" in " ".join(text.split()), text
    assert "memory held" not in printed()


def test_what_was_sent_is_told_by_kind_and_by_what_was_expected() -> None:
    sent = {"all_reduce": 4e6, "all_gather": 2e6}
    shared = {"comm_bytes_per_step": sent, "expected_comm_bytes_per_step": sent, "expected_syncs_per_step": 1}
    text = printed(**shared)
    assert "1 gradient reduction(s) per step, 6.00 MB per rank (all_reduce 4.000, all_gather 2.000)" in text
    assert "expected" not in text
    wrong = {"expected_syncs_per_step": 2, "expected_comm_bytes_per_step": {"all_reduce": 8e6, "all_gather": 2e6}}
    text = " ".join(printed(**shared | wrong, flags=["unexpected_communication"]).split())
    assert "expected 2 reduction(s), all_reduce 8.000 MB (NOT AS EXPECTED: reductions, all_reduce)" in text
    assert "! unexpected_communication: what was sent is not what this strategy should send: see comm_notes" in text


def test_parameters_that_are_sharded_are_not_checked() -> None:
    assert "parameters agree: not checked (weights are gathered)" in printed(
        parameters_agree=None, gather_dtype="bfloat16"
    )
    assert "not checked (weights are gathered)" not in printed(parameters_agree=None)


def test_the_table_shows_the_numbers_with_their_units_and_scope() -> None:
    text = printed()
    for part in (
        "8 x NVIDIA H100 80GB HBM3",
        "4 x 2 x 8 = 64 samples per step",
        "100.0 ± 0.5 ms (95 %)",
        "60 steps in 6 blocks, 6.00 s",
        "640.00, per device 80.00",
        "655,360, in the loss 600,000",
        "10.25 GiB allocated, 12.50 reserved (device)",
        "1.00% of the window",
        "1 gradient reduction(s) per step, 870.00 MB per rank",
        "gradients reduced: yes, parameters agree: yes",
        "10.5000 -> not finite",
    ):
        assert part in text, text


def test_what_the_devices_could_do_and_did_is_shown_where_it_is_known() -> None:
    # 70 of 989.4 TFLOPS are 7.1 %, of 700 are 10 %; 7,680 J over 640 x 6 samples are 2 J each.
    known = {"mfu": 70 / 989.4, "hfu": 70 / 989.4, "peak_tflops": 989.4, "matmul_share": 0.1, "matmul_tflops": 700.0}
    text = printed(**known, energy_j=7680.0, clock_mhz=1755.4)
    for part in ("7.1 % of 989.4 TFLOPS dense", "10.0 % of 700 TFLOPS", "2.000 J per sample", "1755 MHz"):
        assert part in text, text
    assert "HFU" not in text
    assert "HFU 9.4 %" in printed(**known | {"hfu": 0.0943})
    assert not {"MFU", "matmul", "energy", "clock"} & set(printed().split())


def test_every_flag_that_the_suite_raises_is_explained() -> None:
    text = printed(flags=list(FLAGS), parameters_agree=False)
    assert "parameters agree: NO" in text
    assert all(f"! {flag}: {meaning}" in text for flag, meaning in FLAGS.items())
    rows = [Step(i, False, 0, [1.0 + 9 * (i == 9)], [9.0], 1, None, None, True) for i in range(10)]
    assert set(summarise(rows, None).flags) <= set(FLAGS)


@pytest.mark.parametrize("ci95", [None, [0.09, 0.11]])
def test_a_run_on_a_host_names_its_memory_and_threads(ci95: list[float] | None) -> None:
    memory = {"allocated": 0.5, "reserved": None, "kind": "host_resident"}
    times = summary()["step_time_s"] | {"ci95": ci95}
    text = printed(peak_memory_gib=memory, device_name="CPU", world_size=1, step_time_s=times)
    assert "1 rank(s) on CPU, 1 thread(s) each" in text
    assert "0.50 GiB (host resident)" in text
    assert ("±" in text) is (ci95 is not None)
    assert "gradient reduction" not in text
