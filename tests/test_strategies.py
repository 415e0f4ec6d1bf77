"""Every sharding strategy as a user starts it: a complete record, in which strategies stand side by side."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml
from deepspeed_files import config
from launching import ENDLESS, Ended, Launched, forked_ranks, read_error, run_dirs

from scaling.config import BatchConfig, DeepSpeedConfig, validate
from scaling.report import main as report
from scaling.results.record import Summary
from scaling.results.store import read_steps

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("deepspeed_compiled")]

# Two layers of gpt_tiny over 16 positions; a small model is whole in every step unless ZeRO-3 is told to free it.
COMMON = (
    "model=gpt_tiny",
    "model.args.layers=2",
    "model.sequence_length=16",
    "batch.accumulation_steps=2",
    "measure.warmup_steps=1",
    "measure.max_steps=4",
    "measure.matmul_rate=false",
)
FREED = (
    "strategy.param_persistence_threshold=0",
    "strategy.max_live_parameters=0",
    "strategy.max_reuse_distance=0",
)
# As users write them; what is no number comes from the command line, and "auto" inside ZeRO is DeepSpeed's own.
OWN_FILE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2,
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto", "overlap_comm": True},
}
DEEPSPEED = ("zero0", "zero1", "zero2", "zero3", "deepspeed")
STRATEGIES = ("ddp", "fsdp", *DEEPSPEED)


@dataclass(frozen=True)
class Done:
    """A completed run of two ranks; under torchrun their output is one."""

    ended: list[Ended]

    @cached_property
    def path(self) -> Path:
        return Path(self.ended[0].stdout.splitlines()[-1])

    @cached_property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return found

    @cached_property
    def per_parameter(self) -> dict[str, float]:
        """Bytes that a rank holds, over the parameters of the whole model."""
        terms = {name: gib for name, gib in self.summary["memory_terms_gib"].items() if gib is not None}
        return {name: gib * 2**30 / self.summary["parameters"] for name, gib in terms.items()}

    @property
    def deepspeed(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "deepspeed.json").read_text())
        return found


Runs = Callable[[str], Done]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every run of this file is started."""
    path = tmp_path_factory.mktemp("strategies") / "here"
    path.mkdir()
    (path / "own.json").write_text(json.dumps(OWN_FILE))
    return path


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    """The run of a strategy, started when it is first asked for; zero2 by torchrun, the others without a launcher."""
    done: dict[str, Done] = {}

    def run(name: str) -> Done:
        words = [*COMMON, f"strategy={name}"]
        words += FREED if name == "zero3" else ["strategy.config=own.json"] if name == "deepspeed" else []
        if name == "zero2":
            with Launched.torchrun(2, words, folder) as launch:
                ended = [launch.wait()]
                launch.assert_nothing_left()
        else:
            with forked_ranks([words, words], folder) as ranks:
                ended = [rank.wait() for rank in ranks]
        assert [one.code for one in ended] == [0] * len(ended), "\n".join(map(str, ended))
        return Done(ended)

    def known(name: str) -> Done:
        if name not in done:
            done[name] = run(name)
        return done[name]

    return known


@pytest.fixture(params=STRATEGIES)
def done(request: pytest.FixtureRequest, runs: Runs) -> Done:
    return runs(request.param)


def test_the_record_is_complete(done: Done) -> None:
    summary = done.summary
    files = {"config.yaml", "environment.json", "steps.jsonl", "summary.json"}
    extra = {"deepspeed.json"} if summary["strategy"] in DEEPSPEED else set()
    assert {file.name for file in done.path.iterdir()} == files | extra
    assert list(summary) == list(Summary.__dataclass_fields__)
    written = yaml.safe_load((done.path / "config.yaml").read_text())
    assert written["strategy"]["name"] == summary["strategy"]
    assert written["batch"] == {"micro_batch_size": 8, "accumulation_steps": 2, "global_batch_size": 32}
    assert (summary["world_size"], summary["global_batch_size"], summary["skipped_steps"]) == (2, 32, 0)
    steps = read_steps(done.path)
    assert [step.warmup for step in steps] == [True] + [False] * 4
    assert {(step.samples, step.target_tokens, len(step.seconds)) for step in steps} == {(32, 32 * 16, 2)}
    facts = json.loads((done.path / "environment.json").read_text())
    assert len(facts["devices"]) == 2 and "deepspeed" in facts["versions"]


def test_every_strategy_sees_the_same_model_and_loss(done: Done, runs: Runs) -> None:
    reference = runs("ddp")
    assert done.summary["parameters"] == PARAMETERS  # sharding takes the weights away, not the count
    mine, theirs = ([step.loss for step in read_steps(each.path)] for each in (done, reference))
    assert mine == pytest.approx(theirs, rel=1e-5)
    assert done.summary["flops_per_step"] == reference.summary["flops_per_step"]


# Reductions in two micro-steps, and bytes per parameter: all-reducing sends 4 on two ranks, gathering or scattering 2.
SENT = {
    "ddp": (1, {"all_reduce": 4.0}),
    "zero0": (1, {"all_reduce": 4.0}),
    "zero1": (1, {"all_reduce": 4.0, "all_gather": 2.0}),
    "deepspeed": (1, {"all_reduce": 4.0, "all_gather": 2.0}),  # its file asks for stage 1
    "zero2": (2, {"all_reduce": 8.0, "all_gather": 2.0}),
}
# 128 x (256 tokens + 16 positions) and the last normalisation lie outside of the blocks, the embedding being tied.
PARAMETERS = 431_616
OUTSIDE, EMBEDDING = 128 * (256 + 16 + 2), 128 * 256


def test_what_is_sent_is_what_was_expected(done: Done) -> None:
    summary = done.summary
    name, parameters = summary["strategy"], summary["parameters"]
    # Stages 1 to 3 send a norm or an overflow beside it, one number each.
    sent = {kind: total for kind, total in summary["comm_bytes_per_step"].items() if total > 100}
    if name == "fsdp":  # blocks twice in each of two micro-steps, the rest once
        syncs = 2
        expected = {"all_gather": 2 * 2 * (2 * parameters - OUTSIDE), "reduce_scatter": 2 * 2 * parameters}
    elif name == "zero3":  # everything twice, the tied embedding for its second owner too
        syncs = 2
        expected = {"all_gather": 2 * 2 * 2 * (parameters + EMBEDDING), "reduce_scatter": 2 * 2 * parameters}
    else:
        syncs, widths = SENT[name]
        expected = {kind: width * parameters for kind, width in widths.items()}
    assert sent == pytest.approx(expected, abs=8)
    assert summary["syncs_per_step"] == summary["expected_syncs_per_step"] == syncs
    assert summary["expected_comm_bytes_per_step"] == expected
    assert "unexpected_communication" not in summary["flags"]
    assert summary["gradients_reduced"] is True
    assert summary["parameters_agree"] is (True if name in ("ddp", "zero0") else None)  # gathered ones always do


# Bytes per parameter in fp32 with AdamW: model, gradients, optimizer. DeepSpeed's stages keep masters of their own; and
# ZeRO-2 keeps the whole gradient of a parameter through which the border of two ranks goes. Here that is the largest
# weight of the first block: before it lie the embeddings and most of that block, and the second rank holds the rest.
BEFORE = 128 * (256 + 16) + 128 * 1036
HELD = {
    "ddp": (4, 4, 8),
    "zero0": (4, 4, 8),
    "zero1": (4, 4, 4 + 2),
    "deepspeed": (4, 4, 4 + 2),
    "zero2": (4, 4 * (1 - BEFORE / PARAMETERS), 4 + 2),
    "zero3": (2, 2, 4 + 2),
    "fsdp": (2, 2, 4),
}
TEXTBOOK = {
    "ddp": (4, 4, 8),
    "zero0": (4, 4, 8),
    "zero1": (4, 4, 4),
    "deepspeed": (4, 4, 4),
    "zero2": (4, 2, 4),
    "zero3": (2, 2, 4),
    "fsdp": (2, 2, 4),
}
TERMS = ("model", "gradients", "optimizer")


def test_memory_is_told_apart_term_by_term(done: Done) -> None:
    name = done.summary["strategy"]
    held = done.per_parameter
    assert [held[term] for term in TERMS] == pytest.approx(HELD[name], rel=0.01)
    assert done.summary["textbook_bytes_per_parameter"] == dict(zip(TERMS, TEXTBOOK[name], strict=True))
    assert set(held) == {*TERMS, "buffers", "activations", "gathered"}
    assert held["activations"] > 0
    assert held["buffers"] == 0 or name in DEEPSPEED
    # FSDP keeps what lies outside the blocks from forward to backward
    whole = 4 * OUTSIDE / done.summary["parameters"] if name == "fsdp" else 0
    assert held["gathered"] == pytest.approx(whole, rel=0.01)


def test_the_types_are_those_that_travel(done: Done) -> None:
    summary = done.summary
    gathers = None if summary["strategy"] in ("ddp", "zero0") else "float32"
    types = [summary[f"{what}_dtype"] for what in ("parameter", "gather", "reduce")]
    assert types == ["float32", gathers, "float32"]


def test_standard_output_holds_only_the_result(done: Done) -> None:
    first, *others = done.ended
    lines = first.stdout.splitlines()
    assert lines[0].startswith("run  ") and lines[-1] == str(done.path)
    assert any(line.startswith("memory held") for line in lines)
    assert all(other.stdout == "" for other in others)
    assert "DeepSpeed" not in first.stdout and "[INFO]" not in first.stdout
    errors = "".join(one.stderr for one in done.ended)
    assert "Traceback" not in errors
    assert ("DeepSpeed" in errors) is (done.summary["strategy"] in DEEPSPEED)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_the_deepspeed_config_is_recorded_with_every_default_that_matters(name: str, runs: Runs) -> None:
    settings = runs(name).deepspeed
    facts = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "zero_allow_untested_optimizer": name != "deepspeed",  # a user's file is passed on as it is
    }
    assert {key: settings[key] for key in facts} == facts
    assert settings["data_types"]["grad_accum_dtype"] == "fp32"
    zero = settings["zero_optimization"]
    assert zero["stage"] == {"zero1": 1, "deepspeed": 1, "zero2": 2, "zero3": 3}.get(name, 0)
    if name != "zero0":
        own = name == "deepspeed"
        assert zero["overlap_comm"] is True
        assert zero["reduce_bucket_size"] == (500_000_000 if own else 25 * 2**20 // 4)
    if name == "zero3":
        assert zero["stage3_param_persistence_threshold"] == 0
        assert zero["stage3_max_live_parameters"] == zero["stage3_max_reuse_distance"] == 0
    assert '"auto"' not in json.dumps(settings)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_the_recorded_config_can_be_given_as_a_file(name: str, runs: Runs) -> None:
    done = runs(name)
    again = validate(config(done.path / "deepspeed.json", batch=BatchConfig(8, 2)), 2)
    assert isinstance(again.strategy, DeepSpeedConfig)
    assert again.strategy.settings == done.deepspeed
    assert again.batch.sizes == (8, 2, 32)
    with pytest.raises(ValueError, match="x 4 ranks"):  # a record of two ranks is one of two ranks
        validate(config(done.path / "deepspeed.json"), 4)


def test_a_run_on_a_recorded_config_is_the_same_run(runs: Runs, folder: Path) -> None:
    done = runs("zero2")
    words = [*COMMON, "strategy=deepspeed", f"strategy.config={done.path / 'deepspeed.json'}"]
    with forked_ranks([words, words], folder.parent / "again") as ranks:
        ended = [rank.wait() for rank in ranks]
    assert [one.code for one in ended] == [0, 0], "\n".join(map(str, ended))
    again = Done(ended)
    assert again.deepspeed == done.deepspeed
    for key in ("comm_bytes_per_step", "syncs_per_step", "parameters", "gather_dtype", "reduce_dtype"):
        assert again.summary[key] == done.summary[key]
    assert again.per_parameter == pytest.approx(done.per_parameter, rel=0.01)
    assert [s.loss for s in read_steps(again.path)] == pytest.approx([s.loss for s in read_steps(done.path)], rel=1e-6)
    assert "no optimizer step" not in ended[0].stderr
    assert "unexpected_communication" not in again.summary["flags"]


def test_what_a_users_file_makes_of_the_run_is_said(runs: Runs) -> None:
    errors = runs("deepspeed").ended[0].stderr
    assert '! own.json: "auto" stands for DeepSpeed\'s own default in zero_optimization.reduce_bucket_size' in errors
    assert "! own.json: steps_per_print=2: DeepSpeed's progress is put together inside" in errors


def test_the_report_lines_strategies_up(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in STRATEGIES:
        copy = shutil.copytree(runs(name).path, tmp_path / "runs" / runs(name).path.name)
        summary = runs(name).summary
        # Whoever else is busy on this machine is not what is tested here.
        flags = [flag for flag in summary["flags"] if flag not in ("disturbed", "oversubscribed")]
        (copy / "summary.json").write_text(json.dumps(summary | {"flags": flags}))
    assert report([str(tmp_path / "runs"), "--output", str(tmp_path / "report")]) == 0
    printed = capsys.readouterr().out
    assert "Strategies side by side" in printed
    assert "Communication of a step, per rank: counted (expected)" in printed
    assert "Memory held per rank, bytes per parameter: measured / textbook" in printed
    with (tmp_path / "report" / "strategies.csv").open() as file:
        rows = {row["label"]: row for row in csv.DictReader(file)}
    freed = ", ".join(word.removeprefix("strategy.") for word in FREED)
    assert set(rows) == {*STRATEGIES[:-2], f"zero3 ({freed})", "deepspeed (own.json, stage 1)"}
    for label, row in rows.items():
        done = runs(label.split()[0])
        assert row["reasons"] == ""
        if label != "ddp":
            ratio = done.summary["samples_per_s"] / runs("ddp").summary["samples_per_s"]
            assert float(row["throughput"]) == pytest.approx(ratio)
        assert float(row["step_time_s"]) == pytest.approx(done.summary["step_time_s"]["mean"])
        assert float(row["syncs_per_step"]) == done.summary["syncs_per_step"]
        assert float(row["sent_bytes_per_step"]) == sum(done.summary["comm_bytes_per_step"].values())
        assert float(row["model_bytes_per_parameter"]) == pytest.approx(done.per_parameter["model"])
    assert rows["ddp"]["throughput"] == ""


# A rank that dies while the others gather


@pytest.mark.parametrize(
    ("fault", "kind", "message", "in_trace"),
    [
        ("kill", "killed", "rank 1 ended without a word", "fetch_sub_module"),  # where rank 0 waited for it
        ("error", "other", "the loss exploded", "faulty_model.py"),
    ],
)
def test_a_rank_that_dies_inside_a_gather_of_zero_3_ends_the_job(
    fault: str, kind: str, message: str, in_trace: str, tmp_path: Path
) -> None:
    words = [*ENDLESS, "strategy=zero3", *FREED, "model.target=faulty_model:faulty_layer"]
    changes: dict[str, str | None] = {"FAULT": fault, "FAULT_RANK": "1"}
    with forked_ranks([words, words], tmp_path / "here", **changes) as ranks:
        ended = [rank.wait(60) for rank in ranks]
    assert all(one.code != 0 for one in ended)
    (run_dir,) = run_dirs(tmp_path / "here")
    error = read_error(run_dir)
    assert (error["kind"], error["rank"]) == (kind, 1), error
    assert message in error["message"]
    assert in_trace in error["traceback"]
    assert (tmp_path / "here" / "training-1").exists(), "it died in training"
