"""The device catalogue: exact names, dense peaks, and figures that agree with each other and with units x clock."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scaling.hardware import catalogue
from scaling.hardware.catalogue import DeviceEntry, dense_peak, look_up, read

BY_NAME = read(Path(catalogue.__file__).with_name("devices.yaml"))
ENTRIES = list({entry.names: entry for entry in BY_NAME.values()}.values())
every_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry.names[0]))


def known(name: str) -> DeviceEntry:
    entry = look_up(name)
    assert entry is not None, name
    return entry


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
    ],
)
def test_fixed_peaks_are_flops_a_second(name: str, flops: float) -> None:
    assert dense_peak(name, "bf16") == flops


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA H100",
        "NVIDIA A100",
        "H100",
        "NVIDIA H100 80GB HBM3 ",
        " NVIDIA H100 80GB HBM3",
        "nvidia h100 80gb hbm3",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA A100-SXM4-80GB (UUID: GPU-0)",
        "NVIDIA L",
        "NVIDIA L4S",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "AMD Instinct MI300",
        "AMD Instinct MI300A",
        "GAUDI",
        "GAUDI 3",
    ],
)
def test_half_a_name_another_case_a_slice_or_a_tail_is_unknown(name: str) -> None:
    assert look_up(name) is None
    assert dense_peak(name, "bf16") is None


def test_a_card_whose_name_begins_with_anothers_keeps_its_own_figures() -> None:
    assert known("NVIDIA L4").memory_gb == 24
    assert known("NVIDIA L40").memory_gb == known("NVIDIA L40S").memory_gb == 48
    peaks = [dense_peak(name, "bf16") for name in ("NVIDIA L4", "NVIDIA L40", "NVIDIA L40S")]
    assert peaks == pytest.approx([121e12, 181.05e12, 362.05e12])


def test_old_and_new_drivers_names_are_one_entry() -> None:
    assert look_up("A100-SXM4-80GB") is look_up("NVIDIA A100-SXM4-80GB")
    assert look_up("A100-SXM4-40GB") is not look_up("A100-SXM4-80GB")


@pytest.mark.parametrize("name", [name for name in BY_NAME if "V100" in name])
def test_volta_has_fp16_and_fp32_alone(name: str) -> None:
    assert dense_peak(name, "bf16") is None
    assert dense_peak(name, "tf32") is None
    assert dense_peak(name, "fp16") is not None
    assert dense_peak(name, "int8") is None


def test_a_name_in_two_entries_is_refused(tmp_path: Path) -> None:
    one = "{vendor: X, peak_tflops: {fp32: 1}, memory_gb: 1, memory_gb_per_s: 1, source: https://x, names: [A, %s]}"
    path = tmp_path / "devices.yaml"
    path.write_text(f"- {one % 'B'}\n- {one % 'C'}\n")
    with pytest.raises(AssertionError, match="A stands in two entries"):
        read(path)


@pytest.mark.parametrize(("old", "new"), [("memory_gb: 1, ", ""), ("memory_gb", "memory_gib")])
def test_a_missing_or_misspelt_key_is_refused(tmp_path: Path, old: str, new: str) -> None:
    text = "- {names: [A], vendor: X, peak_tflops: {}, memory_gb: 1, memory_gb_per_s: 1, source: https://x}"
    path = tmp_path / "devices.yaml"
    path.write_text(text)
    assert list(read(path)) == ["A"]
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(TypeError, match=r"memory_gi?b"):
        read(path)


@every_entry
def test_an_entry_names_its_vendors_document(entry: DeviceEntry) -> None:
    assert entry.vendor in {"NVIDIA", "AMD", "Intel", "Huawei"}
    assert entry.source
    assert all(re.fullmatch(r"https://[\w.-]+/\S*", url) for url in entry.source)
    assert all(name and name == name.strip() for name in entry.names)


def test_a_known_device_without_a_published_peak_has_none() -> None:
    assert look_up("Ascend910B2") is not None
    assert [dense_peak("Ascend910B2", precision) for precision in ("fp32", "tf32", "bf16", "fp16")] == [None] * 4


@every_entry
def test_peaks_are_positive_and_in_order(entry: DeviceEntry) -> None:
    peaks = entry.peak_tflops
    assert peaks.keys() <= {"fp32", "tf32", "bf16", "fp16"}
    assert peaks or "no MFU" in (entry.note or "")
    assert all(peak > 0 for peak in peaks.values())
    if peaks.get("fp16", peaks.get("bf16")) != peaks.get("bf16", peaks.get("fp16")):
        assert "fp16" in (entry.note or "")
    assert peaks.get("fp32", 0) <= peaks.get("tf32", 1e9)
    assert peaks.get("tf32", 0) <= min(peaks.get("fp16", 1e9), peaks.get("bf16", 1e9))


@every_entry
def test_memory_agrees_with_the_name(entry: DeviceEntry) -> None:
    assert entry.memory_gb is None or 16 <= entry.memory_gb <= 288
    assert entry.memory_gb_per_s is None or 300 <= entry.memory_gb_per_s <= 8000
    for name in entry.names:
        in_name = re.search(r"(\d+)GB?\b", name)
        if in_name and "the GB in the name are the CPU's" not in (entry.note or ""):
            assert entry.memory_gb == int(in_name[1])


@every_entry
def test_pcie_is_one_way(entry: DeviceEntry) -> None:
    if entry.pcie:
        a_slot = {3: 16, 4: 32, 5: 64, 6: 128}[entry.pcie.generation]
        assert entry.pcie.gb_per_s == a_slot * entry.pcie.lanes / 16
    else:
        assert "not PCIe" in (entry.note or "") or entry.vendor == "Huawei"  # which states no slot by part


# One-way GB/s of all links of one chip; vendors print twice that. The first match counts.
LINKS = [
    ("V100", 150),
    ("A100", 300),
    ("A800", 200),
    ("RTX|A40", 56.25),
    ("H800", 200),
    ("H[12]00", 450),
    ("B[23]00", 900),
]
LINKS += [("MI3[02]", 448), ("MI35", 537.6), ("GAUDI2", 300), ("GAUDI3", 600)]


@every_entry
def test_links_are_one_way(entry: DeviceEntry) -> None:
    if entry.link and entry.link.gb_per_s is not None:
        most = next(sum_ for chip, sum_ in LINKS if re.search(chip, entry.names[0]))
        bridged = entry.names[0] in {"NVIDIA H100 PCIe", "NVIDIA H100 NVL"}  # 12 of the 18 links
        assert entry.link.gb_per_s == (300 if bridged else most)


# FLOP a clock of one unit (SM, CU, matrix engine) at fp16 or bf16 with FP32 accumulation, dense, from the white papers.
@pytest.mark.parametrize(
    ("name", "units", "flop_per_clock", "ghz"),
    [
        ("Tesla V100-SXM2-32GB", 80, 1024, 1.530),
        ("NVIDIA A100-SXM4-40GB", 108, 2048, 1.410),
        ("NVIDIA H100 80GB HBM3", 132, 4096, 1.830),
        ("NVIDIA GeForce RTX 3090", 82, 512, 1.695),
        ("NVIDIA GeForce RTX 4090", 128, 512, 2.520),
        ("NVIDIA GeForce RTX 5090", 170, 512, 2.407),
        ("NVIDIA A10", 72, 1024, 1.695),
        ("NVIDIA A40", 84, 1024, 1.740),
        ("NVIDIA RTX A6000", 84, 1024, 1.800),
        ("NVIDIA L40", 142, 512, 2.490),
        ("NVIDIA L40S", 142, 1024, 2.520),
        ("NVIDIA RTX 6000 Ada Generation", 142, 1024, 2.505),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 1024, 2.617),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 1024, 2.430),
        ("AMD Instinct MI250X", 110, 1024, 1.700),
        ("AMD Instinct MI300X", 304, 2048, 2.100),
        ("AMD Instinct MI350X", 256, 4096, 2.200),
        ("AMD Instinct MI355X", 256, 4096, 2.400),
        ("GAUDI2", 2, 2 * 256 * 256, 1.650),
        ("GAUDI3", 8, 2 * 256 * 256, 1.750),
    ],
)
def test_peaks_are_units_times_clock(name: str, units: int, flop_per_clock: int, ghz: float) -> None:
    peak = dense_peak(name, "bf16") or dense_peak(name, "fp16")
    assert peak == pytest.approx(units * flop_per_clock * ghz * 1e9, rel=0.013)  # the L40S's data sheet is 1.2 % off


def test_spot_values_checked_by_hand() -> None:
    h100 = known("NVIDIA H100 80GB HBM3")
    assert (h100.memory_gb_per_s, h100.pcie) == (3350, catalogue.Pcie(generation=5, lanes=16, gb_per_s=64))
    assert h100.link == catalogue.Link("NVLink", 450)
    assert dense_peak("NVIDIA B200", "fp16") == 2250e12
    assert known("NVIDIA GH200 480GB").memory_gb == 96  # 480 GB are the Grace's
    assert known("AMD Instinct MI250X").memory_gb == 64  # a die, half the module
    assert known("AMD Instinct MI300X").memory_gb_per_s == 5300
    assert dense_peak("AMD Instinct MI300X", "fp32") == pytest.approx(163.4e12)
    assert dense_peak("AMD Instinct MI355X", "tf32") is None
    assert dense_peak("GAUDI3", "bf16") == 1835e12
    assert known("NVIDIA GeForce RTX 4090").link is None
    five, four = known("NVIDIA GeForce RTX 5090").pcie, known("NVIDIA GeForce RTX 4090").pcie
    assert five and four and (five.generation, four.generation) == (5, 4)
