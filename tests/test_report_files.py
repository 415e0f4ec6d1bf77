"""`python -m scaling.report --output`: what the files hold, and what is never overwritten."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
from records import a_run, run_report, save, telemetry

from scaling import report
from scaling.reporting.files import write_files
from scaling.reporting.markdown import escape, markdown
from scaling.reporting.sheets import loader_sheet, runs_sheet, scaling_sheet
from scaling.results.reader import MARKS, Run, read_runs

NAMES = ["loader.csv", "report.md", "runs.csv", "scaling.csv"]


def rows_of(sheet: str | None) -> list[dict[str, str]]:
    assert sheet is not None
    return list(csv.DictReader(sheet.splitlines(keepends=True)))


def a_study(root: Path) -> list[Run]:
    """One of each kind: two baselines, a wrapped run, real data, one that failed, and one nobody can read."""
    save(root / "single1", seconds=0.1)
    save(root / "single4", seconds=0.4, accumulation_steps=4)
    save(root / "ddp4", world_size=4, seconds=0.125, comm_bytes_per_step={"all_reduce": 2.5e6})
    save(
        root / "text1", seconds=0.125, data="text-fixed", config={"data": {"name": "text"}}, flags=["drift", "unsteady"]
    )
    failed = save(root / "oom8", world_size=8)
    (failed / "summary.json").unlink()
    (failed / "error.json").write_text(json.dumps({"kind": "oom", "rank": 3, "message": "=1+1|<b>\nmore"}))
    (save(root / "unreadable") / "summary.json").write_text("{")
    return read_runs([root])


# The command


def test_the_report_is_printed_and_written(tmp_path: Path) -> None:
    a_study(tmp_path / "runs")
    folder = tmp_path / "new" / "report"
    alone, result = run_report(tmp_path / "runs"), run_report(tmp_path / "runs", "--output", folder)
    assert (result.returncode, result.stderr) == (0, "")
    written = f"Written to {folder}: report.md, runs.csv, scaling.csv, loader.csv"
    assert result.stdout == f"{alone.stdout}\n{written}\n"
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o644"}
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run_report(tmp_path / "runs", "--output", folder).returncode == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first


def test_an_earlier_report_is_replaced_and_its_loader_removed(tmp_path: Path) -> None:
    a_study(tmp_path / "runs")
    write_files(read_runs([tmp_path / "runs"]), tmp_path / "report")
    said = write_files(read_runs([tmp_path / "runs" / "single1"]), tmp_path / "report")
    assert said.endswith("report.md, runs.csv, scaling.csv; removed loader.csv, of an earlier report")
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == NAMES[1:]
    assert len(rows_of((tmp_path / "report" / "runs.csv").read_text())) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("report.md", "# My own notes\n"),
        ("report.md", "# Scaling report of last week\n"),
        ("report.md", ""),
        ("runs.csv", "name,score\n1,2\n"),
        ("runs.csv", "path,of,mine\n"),
        ("scaling.csv", '"kind","of"\n'),
        ("loader.csv", "x\n"),
        ("runs.csv", None),
    ],
)
def test_a_file_that_no_report_wrote_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None
) -> None:
    a_study(tmp_path / "runs")
    folder = tmp_path / "folder"
    folder.mkdir()
    if content is None:
        (folder / name).mkdir()
    else:
        (folder / name).write_text(content)
    assert report.main([str(tmp_path / "runs"), "--output", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert f"--output {folder}: {name} there was not written by this report" in err
    assert [path.name for path in folder.iterdir()] == [name]
    assert content is None or (folder / name).read_text() == content


def test_a_foreign_file_that_is_not_to_be_written_stays(tmp_path: Path) -> None:
    (tmp_path / "loader.csv").write_text("x\n")
    write_files([a_run(tmp_path / "runs" / "single1")], tmp_path)
    assert (tmp_path / "loader.csv").read_text() == "x\n"


@pytest.mark.parametrize("mark", MARKS)
def test_the_folder_of_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], mark: str) -> None:
    save(tmp_path / "runs" / "single1")
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / mark).write_text("{}")
    assert report.main([str(tmp_path / "runs"), "--output", str(folder)]) == 2
    assert "is a run's own folder" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == [mark]


@pytest.mark.parametrize(("target", "message"), [("file", "is no folder"), ("file/below", "cannot write there")])
def test_a_file_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, message: str) -> None:
    save(tmp_path / "runs" / "single1")
    (tmp_path / "file").write_text("mine")
    assert report.main([str(tmp_path / "runs"), "--output", str(tmp_path / target)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and message in err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(**_: Any) -> None:  # to root, no folder says so itself
        raise PermissionError(13, "Permission denied")

    save(tmp_path / "runs" / "single1")
    monkeypatch.setattr("scaling.reporting.files.tempfile.mkstemp", denied)
    assert report.main([str(tmp_path / "runs"), "--output", str(tmp_path / "locked")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.endswith(f"--output {tmp_path / 'locked'}: cannot write there (Permission denied)\n")


def test_a_disk_that_fills_up_leaves_the_earlier_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(a_study(tmp_path / "runs"), tmp_path / "report")
    before = {path.name: path.read_bytes() for path in (tmp_path / "report").iterdir()}
    opened = os.fdopen
    count = iter([True, True, False])

    def full(*arguments: Any) -> Any:
        if next(count):
            return opened(*arguments)
        os.close(arguments[0])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scaling.reporting.files.os.fdopen", full)
    with pytest.raises(ValueError, match="No space left on device"):
        write_files(read_runs([tmp_path / "runs" / "single1"]), tmp_path / "report")
    assert {path.name: path.read_bytes() for path in (tmp_path / "report").iterdir()} == before


# runs.csv


def test_every_run_has_a_row_with_every_field_of_the_record(tmp_path: Path) -> None:
    rows = {Path(row["path"]).name: row for row in rows_of(runs_sheet(a_study(tmp_path)))}
    assert {name: row["status"] for name, row in rows.items()} == {
        **dict.fromkeys(("single1", "single4", "ddp4", "text1"), "complete"),
        "oom8": "failed",
        "unreadable": "skipped",
    }
    columns = list(rows["ddp4"])
    assert columns[:8] == [
        "path",
        "run_id",
        "status",
        "problem",
        "error.kind",
        "error.rank",
        "error.message",
        "refusals",
    ]
    assert columns[8:10] == ["schema_version", "command"] and columns[-1].startswith("config.")
    assert "batch_statistics" in columns
    assert (rows["ddp4"]["config.optimizer.lr"], rows["ddp4"]["config.model.args.layers"]) == ("0.0001", "4")
    assert rows["ddp4"]["step_time_s.mean"] == "0.125"
    assert float(rows["ddp4"]["step_time_s.ci95.low"]) == 0.125 * (1 - 0.01)
    assert rows["ddp4"]["tflops_per_device"] == repr(32 * 0.1 / 0.125 / 4)
    assert (rows["ddp4"]["comm_bytes_per_step.all_reduce"], rows["single1"]["comm_bytes_per_step.all_reduce"]) == (
        "2500000.0",
        "",
    )
    assert (rows["ddp4"]["link.observed"], rows["ddp4"]["gradients_reduced"], rows["ddp4"]["mfu"]) == (
        "P2P",
        "true",
        "",
    )
    assert (rows["text1"]["flags"], rows["text1"]["loss.last"]) == ("drift unsteady", "4.0")


def test_what_is_known_of_a_run_without_a_summary_is_in_its_row(tmp_path: Path) -> None:
    rows = {Path(row["path"]).name: row for row in rows_of(runs_sheet(a_study(tmp_path)))}
    failed, unreadable = rows["oom8"], rows["unreadable"]
    assert (failed["run_id"], failed["model"], failed["world_size"], failed["samples_per_s"]) == (
        "oom8",
        "gpt_tiny",
        "8",
        "",
    )
    assert (failed["error.kind"], failed["error.rank"], failed["refusals"]) == ("oom", "3", "failed: oom")
    assert unreadable["problem"].startswith("summary.json: not JSON")


def test_text_that_a_spreadsheet_would_compute_is_quoted_and_numbers_are_not(tmp_path: Path) -> None:
    a_study(tmp_path)
    save(tmp_path / "-1+cmd", seconds=0.1, loss={"first": -1.5, "last": None}, model="@SUM(A1)")
    rows = {row["run_id"]: row for row in rows_of(runs_sheet(read_runs([tmp_path])))}
    assert rows["oom8"]["error.message"] == "'=1+1|<b>\nmore"
    strange = rows["'-1+cmd"]
    assert (strange["model"], strange["loss.first"], strange["loss.last"]) == ("'@SUM(A1)", "-1.5", "")


def test_lines_end_as_rfc_4180_has_them_and_telemetry_is_json(tmp_path: Path) -> None:
    run = a_run(tmp_path / "two", world_size=2, telemetry=[telemetry(), None])
    sheet = runs_sheet([run])
    assert sheet.count("\r\n") == sheet.count("\n") == 2
    (row,) = rows_of(sheet)
    assert run.summary is not None and json.loads(row["telemetry"]) == run.summary["telemetry"]


def test_what_a_free_mapping_holds_is_flattened_or_left_as_it_is(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "none")]
    costs: list[dict[str, Any]] = [
        {"mean": 0.5, "ci95": [0.4, 0.6]},
        {"ci95": None},
        {"ci95": 3, "per": {"rank": [1, 2]}},
    ]
    runs += [a_run(tmp_path / f"{number}", gradient_sync_cost_s=cost) for number, cost in enumerate(costs)]
    rows = rows_of(runs_sheet(runs))
    names = [name.removeprefix("gradient_sync_cost_s.") for name in rows[0] if name.startswith("gradient_sync_cost_s")]
    assert names == ["ci95", "ci95.high", "ci95.low", "mean", "per.rank"]
    assert [[row[f"gradient_sync_cost_s.{name}"] for name in names] for row in rows] == [
        ["", "", "", "", ""],
        ["", "0.6", "0.4", "0.5", ""],
        ["", "", "", "", ""],
        ["3", "", "", "", "[1,2]"],
    ]


def test_a_record_of_the_first_version_has_empty_cells(tmp_path: Path) -> None:
    folder = save(tmp_path / "old")
    content = json.loads((folder / "summary.json").read_text())
    late = ["hardware_flops_per_step", "peak_tflops", "peak_source", "matmul_tflops", "matmul_share", "telemetry"]
    for name in [*late, "channels_last", "batch_statistics"]:
        del content[name]
    (folder / "summary.json").write_text(json.dumps(content))
    runs = read_runs([tmp_path])
    (row,) = rows_of(runs_sheet(runs))
    assert [row[name] for name in late] == [""] * len(late)
    assert (row["refusals"], row["samples_per_s"]) == ("", "80.0")
    assert "share of matmul" not in markdown(runs)


# scaling.csv and loader.csv


def test_scaling_rows_are_fractions_with_their_reasons(tmp_path: Path) -> None:
    rows = rows_of(scaling_sheet(a_study(tmp_path)))
    weak, without, strong, _ = rows
    # Weak: X(4) = 32 / 0.125 = 256 against 4 x 80; strong: T(1) / T(4) = 0.4 / 0.125 = 3.2.
    assert (weak["kind"], weak["runs"], weak["against"], weak["baseline"]) == ("weak", "ddp4", "single", "single1")
    assert float(weak["efficiency"]) == pytest.approx(0.8)
    half = 0.8 * 2**0.5 * 0.01
    assert (float(weak["low"]), float(weak["high"])) == pytest.approx((0.8 - half, 0.8 + half))
    assert (weak["basis"], weak["repeats"], weak["base_repeats"], weak["impossible"]) == ("ci95", "1", "1", "false")
    assert (weak["world_size"], weak["global_batch_size"], weak["speedup"]) == ("4", "32", "")
    assert without["efficiency"] == "" and without["reasons"].startswith("no completed one-device `ddp` run")
    assert strong["kind"] == "strong" and float(strong["speedup"]) == pytest.approx(3.2)
    assert strong["remarks"] == "accumulation 4→1"


def test_an_impossible_efficiency_is_marked(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "one"), a_run(tmp_path / "two", world_size=2, seconds=0.05)]
    row = rows_of(scaling_sheet(runs))[0]
    assert row["impossible"] == "true" and float(row["efficiency"]) == pytest.approx(2.0)
    assert row["reasons"].startswith("impossible: above 100 %")


def test_the_loader_has_its_share_or_no_file(tmp_path: Path) -> None:
    runs = a_study(tmp_path)
    (row,) = rows_of(loader_sheet(runs))
    assert (row["runs"], row["synthetic"], row["data"], row["flags"]) == (
        "text1",
        "single1",
        "text-fixed",
        "drift unsteady",
    )
    assert float(row["share"]) == pytest.approx(0.2)
    assert float(row["data_wait"]) == pytest.approx(0.02)
    assert loader_sheet([run for run in runs if run.run_id != "text1"]) is None


# report.md


def test_markdown_holds_the_tables_of_the_terminal(tmp_path: Path) -> None:
    text = markdown(a_study(tmp_path))
    lines = text.splitlines()
    assert lines[0] == "# Scaling report"
    titles = [line.split(":")[0] for line in lines if line.startswith("## ")]
    assert titles == ["## Runs", "## Weak scaling", "## Strong scaling", "## Loader"]
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("| ")]
    for table in tables:  # a pipe that is no border is escaped
        assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert (
        "| #4 ddp4 | gpt_tiny | ddp | 4 | 8 x 1 (32) | single #1 single1 | 80.0 % [78.9, 81.1] 95 % interval, n=1 |"
        in (lines)
    )
    assert "failed: oom on rank 3: =1+1\\|&lt;b&gt; |" in text
    assert lines[-1].startswith(f"Skipped: {tmp_path / 'unreadable'}: summary.json: not JSON")


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("a|b", "a\\|b"),
        ("one\ntwo\r\nthree", "one<br>two<br>three"),
        ("<script>alert(1)</script> & co", "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co"),
        ("`rm` *all* ~~now~~", "\\`rm\\` \\*all\\* \\~\\~now\\~\\~"),
        ("gpt_tiny __init__ _x", "gpt_tiny \\_\\_init\\_\\_ \\_x"),
        ("98.9 % [96.8, 101.0]", "98.9 % [96.8, 101.0]"),
        ("![x](http://y) [a]: b", "![x]\\(http://y) [a]\\: b"),
        ("end\\", "end\\\\"),
        ("\x1b[31mred\x00", "[31mred"),
    ],
)
def test_a_cell_shows_as_it_is(cell: str, shown: str) -> None:
    assert escape(cell) == shown


def test_a_nasty_name_stays_in_its_cell(tmp_path: Path) -> None:
    run = a_run(tmp_path / "r", run_id="a|b\n# `<script>`")
    table = [line for line in markdown([run]).splitlines() if line.startswith("| #1")]
    assert len(table) == 1
    assert table[0].startswith("| #1 | a\\|b<br># \\`&lt;script&gt;\\` | gpt_tiny |")


def test_a_name_of_a_file_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "run")
    assert report.main([str(tmp_path), "--output", str(tmp_path / "out.csv")]) == 2
    assert "out.csv: looks like a file; name the folder for report.md, runs.csv, scaling.csv" in capsys.readouterr().err


def test_a_folder_inside_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "run")
    assert report.main([str(tmp_path), "--output", str(tmp_path / "run" / "report")]) == 2
    assert f"{tmp_path / 'run'} is a run's own folder; name another one" in capsys.readouterr().err
    assert not (tmp_path / "run" / "report").exists()
