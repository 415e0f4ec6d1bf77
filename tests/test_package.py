"""conf/ is found from a checkout, an editable install and an installed wheel alike."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import scaling
from scaling.config import conf_dir

ROOT = Path(__file__).parent.parent


def test_an_editable_install_and_a_checkout_find_the_top_level_conf() -> None:
    assert Path(scaling.__file__).parent.parent == ROOT
    assert conf_dir() == ROOT / "conf"


def test_a_wheel_carries_its_conf_and_runs_elsewhere(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel = next(tmp_path.glob("*.whl"))
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # -S leaves out the site packages and with them the editable install; the libraries come back by path.
    path = os.pathsep.join([str(site), sysconfig.get_paths()["purelib"]])
    run = subprocess.run(
        [sys.executable, "-S", "-m", "scaling.train", "model=gpt_tiny", "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "torchrun --nproc_per_node=8 -m scaling.train" in run.stdout
    where = subprocess.run(
        [sys.executable, "-S", "-c", "from scaling.config import conf_dir; print(conf_dir())"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    assert Path(where.stdout.strip()) == site / "scaling" / "conf"
