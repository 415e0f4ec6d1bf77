"""launch/*.sh in a copy of the checkout, with a torchrun that only notes how it was called."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parent.parent / "launch"
TOOLS = ("bash", "cat", "date", "dirname", "env", "mkdir", "readlink", "sleep", "touch")
START = "--- called"
NOTE = f"""#!/usr/bin/env bash
printf '%s\\n' '{START}' "$0" "$@" >>"$CALLS"
"""


class Checkout:
    """A folder with launch/ in it, and a PATH of a few tools on which no other torchrun can be."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "check out"  # a path with a space, as people have them
        self.tools = folder / "bin"
        self.calls_file = folder / "calls"
        self.work = folder / "elsewhere"
        for path in (self.tools, self.work):
            path.mkdir()
        shutil.copytree(LAUNCH, self.root / "launch")
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None
            (self.tools / tool).symlink_to(found)
        self.env = {"PATH": str(self.tools), "CALLS": str(self.calls_file)}

    def fake(self, name: str, more: str = "", folder: Path | None = None) -> Path:
        """A command that notes its arguments and then runs `more`."""
        path = (folder or self.tools) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(NOTE + more)
        path.chmod(0o755)
        return path

    def run(self, script: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(path or self.root / "launch" / script), *arguments]
        return subprocess.run(
            command, cwd=self.work, env=self.env, capture_output=True, text=True, timeout=60, check=False
        )

    @property
    def calls(self) -> list[list[str]]:
        """What the fake commands were called with, the command first."""
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        return [call.removesuffix("\n").split("\n") for call in text.split(f"{START}\n")[1:]]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


OVERRIDES = ["model=gpt_tiny", "model.args={layers: 1}", "data.path=/a folder/*", "optimizer.clip=", "$HOME"]
STARTED = ["--standalone", "--nproc_per_node=3", "-m", "scaling.train"]


def test_local_passes_every_override_through_as_it_is(checkout: Checkout) -> None:
    torchrun = checkout.fake("torchrun")
    done = checkout.run("local.sh", "3", *OVERRIDES)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert checkout.calls == [[str(torchrun), *STARTED, *OVERRIDES]]


def test_local_takes_the_torchrun_of_the_checkout_and_its_folder_first(checkout: Checkout) -> None:
    checkout.fake("torchrun", "exit 1")
    bin_folder = checkout.root / ".venv" / "bin"
    torchrun = checkout.fake("torchrun", 'echo "$PATH"', bin_folder)
    done = checkout.run("local.sh", "3")
    assert done.returncode == 0
    assert checkout.calls == [[str(torchrun), *STARTED]]
    assert done.stdout.strip() == f"{bin_folder}:{checkout.tools}"  # DeepSpeed looks for ninja on PATH


def test_local_works_through_a_symbolic_link(checkout: Checkout) -> None:
    torchrun = checkout.fake("torchrun", folder=checkout.root / ".venv" / "bin")
    link, second = checkout.work / "link", checkout.tools / "second"
    second.symlink_to(checkout.root / "launch" / "local.sh")
    link.symlink_to(second)
    assert checkout.run("", "3", path=link).returncode == 0
    assert checkout.calls == [[str(torchrun), *STARTED]]


def test_local_finds_scaling_for_a_torchrun_without_it(checkout: Checkout) -> None:
    checkout.fake("torchrun", 'echo "$PYTHONPATH"')
    assert checkout.run("local.sh", "1").stdout.strip() == str(checkout.root)
    checkout.env["PYTHONPATH"] = "/mine"
    assert checkout.run("local.sh", "1").stdout.strip() == f"{checkout.root}:/mine"


def test_local_ends_as_torchrun_ends(checkout: Checkout) -> None:
    checkout.fake("torchrun", "exit 7")
    assert checkout.run("local.sh", "1").returncode == 7


@pytest.mark.parametrize("nproc", [(), ("",), ("two",), ("0",), ("-1",), ("2x",), ("1.5",), ("model=gpt2", "2")])
def test_local_refuses_what_is_no_number_of_processes_in_one_line(checkout: Checkout, nproc: tuple[str, ...]) -> None:
    checkout.fake("torchrun")
    done = checkout.run("local.sh", *nproc)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("launch/local.sh: error: ")
    assert "NPROC" in line
    assert not nproc or nproc[0] in line
    assert checkout.calls == []


def test_local_says_in_one_line_that_there_is_no_torchrun(checkout: Checkout) -> None:
    done = checkout.run("local.sh", "2")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "no torchrun" in line
    assert "make setup" in line


@pytest.mark.parametrize("script", ["local.sh", "demo.sh"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_starts_nothing(checkout: Checkout, script: str, flag: str) -> None:
    checkout.fake("torchrun")
    done = checkout.run(script, flag)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: launch/{script}")
    assert checkout.calls == []
    assert list(checkout.work.iterdir()) == []


RUNS = [("1", "single", "1"), ("1", "ddp", "1"), ("2", "ddp", "1"), ("1", "single", "4"), ("1", "ddp", "4")]
RUNS += [("2", "ddp", "4")]


def asked(call: list[str]) -> tuple[str, str, str]:
    """(ranks, strategy, accumulation) of a call of torchrun."""
    given = dict(argument.lstrip("-").split("=", 1) for argument in call[1:] if "=" in argument)
    assert given["model"] == "gpt_tiny"
    assert given["data"] == "text"
    return given["nproc_per_node"], given["strategy"], given["batch.accumulation_steps"]


def test_demo_measures_six_runs_in_a_new_folder_and_reports_on_it(checkout: Checkout) -> None:
    checkout.fake("torchrun")
    python = checkout.fake("python3", "echo THE TABLES")
    done = checkout.run("demo.sh", "measure.max_steps=2")
    assert done.returncode == 0, done.stderr
    *runs, report = checkout.calls
    assert [asked(call) for call in runs] == RUNS
    assert all(call[-1] == "measure.max_steps=2" for call in runs)
    (folder,) = (checkout.work / "runs").glob("demo-*")
    relative = str(folder.relative_to(checkout.work))
    assert {argument for call in runs for argument in call if argument.startswith("output_dir")} == {
        f"output_dir={relative}"
    }
    assert report == [str(python), "-m", "scaling.report", relative]
    lines = [line for line in done.stdout.splitlines() if line]
    assert [line[:8] for line in lines[:6]] == [f"[{run} of 6]" for run in range(1, 7)]
    assert lines[6:] == ["THE TABLES", f"records: {folder}"]


def test_demo_goes_on_after_a_failed_run_and_fails_in_the_end(checkout: Checkout) -> None:
    checkout.fake("torchrun", '[[ $* != *nproc_per_node=2* ]] || { echo "no such device" >&2; exit 1; }')
    checkout.fake("python3")
    done = checkout.run("demo.sh")
    assert done.returncode == 1
    assert len(checkout.calls) == 7
    assert "2 of the steps above failed" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("records: ")


def test_demo_fails_if_there_is_nothing_to_report(checkout: Checkout) -> None:
    checkout.fake("torchrun")
    checkout.fake("python3", "exit 2")
    assert checkout.run("demo.sh").returncode == 1


def test_two_demos_never_share_a_folder(checkout: Checkout) -> None:
    checkout.fake("torchrun")
    checkout.fake("python3")
    (checkout.tools / "date").unlink()
    (checkout.tools / "date").write_text("#!/usr/bin/env bash\necho 20260101-000000\n")
    (checkout.tools / "date").chmod(0o755)
    assert checkout.run("demo.sh").returncode == 0
    again = checkout.run("demo.sh")
    assert again.returncode != 0
    assert "demo-20260101-000000" in again.stderr
    assert len(checkout.calls) == 7


def test_ctrl_c_ends_the_whole_demo(checkout: Checkout) -> None:
    """Also where the launcher handles the signal and ends in a way of its own."""
    started = checkout.work / "started"
    checkout.fake("torchrun", f"trap 'exit 1' INT\ntouch '{started}'\nfor _ in {{1..600}}; do sleep 0.1; done\n")
    checkout.fake("python3")
    demo = subprocess.Popen(
        [str(checkout.root / "launch" / "demo.sh")],
        cwd=checkout.work,
        env=checkout.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 30
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(demo.pid, signal.SIGINT)  # a terminal sends it to the whole group
        _, errors = demo.communicate(timeout=30)
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
            demo.wait()
    assert demo.returncode == 130
    assert "records so far: " in errors
    assert len(checkout.calls) == 1
