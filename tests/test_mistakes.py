"""What a user gets wrong ends in one line that says what, where, and what would work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import SMALL, Ended, Launched, environment, forked, rank_environment

from scaling import command
from scaling.command import repeat_command
from scaling.command_line import CommandLine
from scaling.config import conf_dir
from scaling.ranks import Launch

PLAIN = Launch(0, 0, 1, 1, 1, torchrun=False)


def refusal(ended: Ended) -> str:
    """The one line of a refused command, without its prefix."""
    assert ended.code == 2, str(ended)
    assert len(ended.errors) == 1, str(ended)
    assert "Traceback" not in ended.stderr, str(ended)
    assert ended.stdout == ""
    return ended.errors[0].removeprefix("scaling.train: error: ")


def assert_refused(ended: Ended, *words: str) -> None:
    line = refusal(ended)
    assert all(word in line for word in words), line


# ---- the command line itself: refused before anything is made


@pytest.mark.parametrize(
    ("line", "words"),
    [
        # what there is not
        (
            "model=gpt_tny",
            ["model=gpt_tny: no such model (did you mean gpt_tiny", "there are: bert_large, bert_tiny, custom, gpt2, "],
        ),
        (
            "strategy=zero9",
            ["strategy=zero9: no such strategy", "there are: ddp, deepspeed, fsdp, single, zero0, zero1, zero2, zero3"],
        ),
        (
            "stategy=ddp",
            ["stategy=ddp: no such key (did you mean strategy", "the config has batch, checkpointing, compile"],
        ),
        ("measure.max_step=3", ["measure.max_step=3: no such key (did you mean measure.max_steps", "measure has"]),
        ("max_steps=3", ["max_steps=3: no such key (did you mean measure.max_steps", "the config has batch"]),
        (
            "model.args.layer=3",
            ["model.args.layer=3: no such key (did you mean model.args.layers", "model.args has heads"],
        ),
        ("model.args={layer:3}", ["model.args={layer:3}: no such key (did you mean model.args.layers"]),
        ("model=custom", ["model.target: has no value here, and needs one: model.target=...; it is package.module"]),
        (
            "model=custom model.target=a:b model.args=3",
            ["model.args=3: model.args holds arguments; write model.args.NAME"],
        ),
        ("model=custom model.target=a:b model.args.x=[1", ["model.args.x=[1: cannot be read"]),
        ("model=custom model.target=a:b model.args.x=1,2", ["model.args.x=1,2: several values are a sweep"]),
        ("model=gpt_tiny model.args.x=1", ["model.args.x=1: no such key", "model.args has heads, hidden_size"]),
        ("data=images data.path=", ["data.path= is empty; name a file or folder, or leave it out"]),
        ("data=images data.path=no/such", ["data.path=no/such: no such folder in /"]),
        ("data=text data.path=no/such", ["data.path=no/such: no such file or folder in /"]),
        ("optimizer=sgd", ["optimizer=sgd: optimizer is a group of keys, name, lr, clip; write optimizer.KEY=VALUE"]),
        ("batch=4", ["batch=4: batch is a group of keys, micro_batch_size"]),
        ("model=bert", ["model=bert: no such model (did you mean bert_large or bert_tiny?)"]),
        ("data=images", ["data.path: data=images needs a folder of class folders: data.path=FOLDER"]),
        ("data=images data.path=/x data.workers=-1", ["data.workers=-1: must be at least 0"]),
        ("model=resnet_tiny model.image_size=0", ["model.image_size=0: must be at least 1"]),
        ("data.path=/x", ["data.path=/x: data.path belongs to data=images, data=text; here data has batches, name"]),
        ("data=text data.batches=2", ["data.batches=2: data.batches belongs to data=synthetic; here data has lengths"]),
        (
            "strategy=single strategy.bucket_mb=1",
            [
                "bucket_mb belongs to strategy=ddp, strategy=zero1, strategy=zero2, strategy=zero3",
                "here strategy has name",
            ],
        ),
        ("data.name=text", ["data.name=text: choose with data=OPTION; there are: synthetic, text"]),
        # what does not fit
        ("measure.max_steps=many", ["measure.max_steps=many:", "'many'", "Integer"]),
        ("compile=perhaps", ["compile=perhaps:", "'perhaps'"]),
        ("optimizer.lr=-1", ["optimizer.lr=-1.0: must be greater than 0"]),
        ("optimizer.name=adam", ["optimizer.name=adam: choose one of adamw, sgd"]),
        (
            "batch.micro_batch_size=2 batch.accumulation_steps=3 batch.global_batch_size=12",
            ["micro_batch_size=2", "accumulation_steps=3", "global_batch_size=12", "give two", "1 rank"],
        ),
        # what cannot be read
        ("seed", ["seed: not an override; write key=value or group=option"]),
        ("seed=[1", ["seed=[1: cannot be read"]),
        ("output_dir=~/runs", ["output_dir=~/runs: cannot be read", "quote the value"]),
        # what Hydra would take
        ("--multirun", ["--multirun: one launch is one measurement", "scaling.study"]),
        ("-m seed=1,2", ["-m: one launch is one measurement", "scaling.study"]),
        ("model=gpt2,gpt_tiny", ["model=gpt2,gpt_tiny: several values are a sweep", "scaling.study"]),
        ("seed=range(3)", ["seed=range(3): several values are a sweep", "scaling.study"]),
        ("+new=1", ["+new=1: keys are neither added nor removed here", "key=value"]),
        ("++seed=1", ["++seed=1: keys are neither added nor removed here"]),
        ("~model", ["~model: keys are neither added nor removed here"]),
        ("hydra.mode=MULTIRUN", ["hydra.mode=MULTIRUN: Hydra's own settings are fixed here"]),
        ("hydra.run.dir=here", ["hydra.run.dir=here: Hydra's own settings are fixed here"]),
        ("hydra/launcher=basic", ["Hydra's own settings are fixed here"]),
        ("--config-name=other", ["--config-name=other: no such option; did you mean --config-dir?"]),
        ("--nproc_per_node=2", ["--nproc_per_node=2: no such option; options are written key=value"]),
        ("--cfg", ["--cfg=: needs one of job, hydra, all"]),
        ("--cfg everything", ["--cfg=everything: needs one of job, hydra, all"]),
        ("--help=1", ["--help=1: --help takes no value"]),
        ("--resolve", ["--resolve", "--cfg"]),
        ("--config-dir /nowhere", ["--config-dir=/nowhere: no such folder"]),
        ("--cfg job model=gpt3", ["model=gpt3: no such model (did you mean gpt2?)"]),
        ("--help modl=gpt2", ["modl=gpt2: no such key (did you mean model?)"]),
    ],
)
def test_a_command_line_that_is_wrong(line: str, words: list[str], tmp_path: Path) -> None:
    assert_refused(forked(line.split(), tmp_path / "here"), *words)
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "batch.micro_batch_size=3 batch.global_batch_size=16",
            ["batch.global_batch_size=16 does not divide by micro_batch_size=3 x 2 ranks = 6", "12 or 18"],
        ),
        (
            "batch.accumulation_steps=5 batch.global_batch_size=16",
            ["batch.global_batch_size=16 does not divide by accumulation_steps=5 x 2 ranks = 10", "10 or 20"],
        ),
        (
            "batch.global_batch_size=1",
            ["global_batch_size=1", "accumulation_steps=1 x 2 ranks = 2", "nearest that does: 2"],
        ),
        ("strategy=single", ["strategy=single", "2 ranks", "strategy=ddp, or --nproc_per_node=1"]),
    ],
)
def test_a_config_that_does_not_fit_the_world(line: str, words: list[str], tmp_path: Path) -> None:
    """Rank 0 of two is enough: it is refused before the ranks meet."""
    assert_refused(forked(line.split(), tmp_path / "here", rank_environment(0, 2, 29500)), *words)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0", "LOCAL_RANK": "0"}, ["WORLD_SIZE, LOCAL_WORLD_SIZE not set, but RANK, LOCAL_RANK"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_SIZE=2 but no WORLD_SIZE", "torchrun"]),
    ],
)
def test_a_launcher_that_is_none(variables: dict[str, str | None], words: list[str], tmp_path: Path) -> None:
    assert_refused(forked(SMALL, tmp_path / "here", environment(**variables)), *words)


# ---- this machine, its files, and the model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with texts that are none, and folders that cannot be had."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "empty.txt").touch()
    (folder / "little.txt").write_text("hello")
    (folder / "nothing" / ".hidden").mkdir(parents=True)
    (folder / "binary").mkdir()
    (folder / "binary" / "weights.bin").write_bytes(b"a\0b")
    (folder / "taken").mkdir()
    return folder


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("precision=fp16", ["precision=fp16: cpu (", "it does fp32, bf16"]),
        ("precision=tf32", ["precision=tf32: cpu (", "it does fp32, bf16"]),
        ("device=cuda", ["device=cuda: not on this host; there is: auto, cpu"]),
        ("device=cuda:1", ["device=cuda:1: not on this host; the index comes from LOCAL_RANK; there is: auto, cpu"]),
        ("data=text data.path=gone", ["data.path=gone: no such file or folder"]),
        ("data=text data.path=nothing", ["data.path=nothing: no files in this folder"]),
        ("output_dir=empty.txt", ["output_dir=empty.txt: empty.txt is a file, not a folder"]),
        ("output_dir=empty.txt/runs", ["output_dir=empty.txt/runs: cannot write there (Not a directory)"]),
        ("output_dir=/proc/runs", ["output_dir=/proc/runs: cannot write there"]),
        ("run_dir=taken", ["run_dir=taken: exists already, and no run is overwritten"]),
        ("run_dir=empty.txt", ["run_dir=empty.txt: empty.txt is a file"]),
    ],
)
def test_what_this_host_cannot_do_is_refused_before_a_run_directory_is_made(
    line: str, words: list[str], place: Path
) -> None:
    before = sorted(place.rglob("*"))
    assert_refused(forked([*SMALL, *line.split()], place), *words)
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("data=text data.path=empty.txt", ["data.path=empty.txt: no text there"]),
        ("data=text data.path=binary", ["data.path=binary: no text there"]),
        ("data=text data.path=little.txt", ["0 samples do not fill one global batch of 8", "batch.global_batch_size"]),
        ("model.target=no.such:thing", ["model.target=no.such:thing: No module named 'no'", "package.module:function"]),
        ("model.target=json:gone", ["model.target=json:gone: module 'json' has no attribute 'gone'"]),
        ("model.target=json.decoder", ["model.target=json.decoder", "package.module:function"]),
        ("model.target=os:environ", ["model.target=os:environ is no function"]),
        ("model.image_size=64", ["model.image_size=64: scaling.workload.transformer:gpt2 takes no image_size"]),
        ("model.target=os:getcwd", ["model.sequence_length=16: os:getcwd takes no sequence_length"]),
        ("model.target=builtins:dict", ["model.target=builtins:dict returned dict, not a scaling.workload.Workload"]),
        ("model.args.heads=3", ["model.args: hidden_size=128 does not divide by heads=3"]),
    ],
)
def test_what_shows_while_the_run_is_built(line: str, words: list[str], place: Path) -> None:
    assert_refused(forked([*SMALL, *line.split()], place), *words)


# ---- the user's own folder of configs


@pytest.fixture(scope="module")
def own_configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "model").mkdir()
    shipped = (conf_dir() / "model" / "gpt_tiny.yaml").read_text()
    (folder / "model" / "mine.yaml").write_text(shipped.replace("gpt_tiny", "mine"))
    (folder / "model" / "broken.yaml").write_text("name: [")
    (folder / "model" / "odd.yaml").write_text("defaults: [/schema/model@_here_]\nname: odd\ncolour: red\n")
    return folder


def test_a_folder_of_the_users_adds_options(own_configs: Path, tmp_path: Path) -> None:
    ended = forked(["--config-dir", str(own_configs), "model=mine", "--cfg", "job", "seed=3"], tmp_path / "here")
    assert (ended.code, ended.stderr) == (0, ""), str(ended)
    assert "name: mine" in ended.stdout
    assert "seed: 3" in ended.stdout


def test_batch_normalisation_over_one_value_is_refused(place: Path) -> None:
    line = ["model=resnet_tiny", "model.image_size=32", "batch.micro_batch_size=1", "strategy=single"]
    assert_refused(forked(line, place), "batch.micro_batch_size=1: at model.image_size=32", "use 2, or larger images")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("model=min", ["model=min: no such model (did you mean mine?); there are: ", " broken, ", " mine, odd, "]),
        ("model=mine model.args.layer=1", ["model.args.layer=1: no such key (did you mean model.args.layers"]),
        ("model=odd", ["model/odd", "'colour' not in 'ModelConfig'"]),
        ("model=broken", ["/model/broken.yaml", "line 1"]),
    ],
)
def test_mistakes_with_a_folder_of_the_users(line: str, words: list[str], own_configs: Path, tmp_path: Path) -> None:
    assert_refused(forked([f"--config-dir={own_configs}", *line.split()], tmp_path / "here"), *words)


# ---- help


def test_help_lists_groups_and_keys(tmp_path: Path) -> None:
    ended = forked(["--help", "model=gpt_tiny"], tmp_path / "here")
    assert (ended.code, ended.stderr) == (0, ""), str(ended)
    assert "  model: bert_large, bert_tiny, custom, gpt2, gpt2_large, " in ended.stdout
    assert "  strategy: ddp, deepspeed, fsdp, single, zero0, zero1, zero2, zero3\n" in ended.stdout
    assert "max_steps:" in ended.stdout
    assert "layers: 4" in ended.stdout, "the values are those of this command line"
    assert "schema" not in ended.stdout
    assert "${" not in ended.stdout


@pytest.mark.parametrize("line", ["-c job seed=3", "seed=3 --cfg job model=gpt_tiny", "model=gpt2 seed=3 --cfg=job"])
def test_the_config_is_printed_wherever_the_flag_stands(line: str, tmp_path: Path) -> None:
    ended = forked(line.split(), tmp_path / "here")
    assert (ended.code, ended.stderr) == (0, ""), str(ended)
    assert "seed: 3" in ended.stdout
    assert "schema" not in ended.stdout
    assert "hydra" not in ended.stdout
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize(
    "line", ["--info", "--info model=gpt2", "-i defaults-tree model=gpt2", "model=gpt2 --info=all"]
)
def test_info_works_with_and_without_a_topic(line: str, tmp_path: Path) -> None:
    ended = forked(line.split(), tmp_path / "here")
    assert ended.code == 0, str(ended)
    assert "Defaults Tree" in ended.stdout
    assert "gpt2" in ended.stdout


@pytest.mark.parametrize("flag", ["--help", "--cfg=job", "--info"])
def test_printing_imports_no_model_library(flag: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "scaling.train", flag],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "omegaconf" in imported, "the list is the one of this process"
    assert not {name for name in imported if name.split(".")[0] in ("transformers", "deepspeed", "wandb")}


# ---- who says it, and how the process ends


def test_plain_python_ends_with_two(tmp_path: Path) -> None:
    with Launched.python(["model=gpt_tny"], tmp_path / "here") as launch:
        assert_refused(launch.wait(), "did you mean gpt_tiny")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("model=gpt_tny", ["model=gpt_tny: no such model (did you mean gpt_tiny"]),
        ("model=gpt_tiny model.args.heads=3", ["model.args: hidden_size=128 does not divide by heads=3"]),
    ],
)
def test_two_ranks_say_it_once(line: str, words: list[str], tmp_path: Path) -> None:
    """While composing, where ranks know nothing of each other, and while building, where they agree."""
    with Launched.torchrun(2, line.split(), tmp_path / "here") as launch:
        ended = launch.wait()
        launch.assert_nothing_left()
    assert len(ended.errors) == 1, str(ended)
    assert all(word in ended.errors[0] for word in words)
    ours, _, torchruns = ended.stderr.partition(ended.errors[0])
    assert "Traceback" not in ours
    assert "ChildFailedError" in torchruns
    assert torchruns.count("Traceback") == 1, "torchrun's own"


@pytest.mark.ranks
def test_two_ranks_help_once(tmp_path: Path) -> None:
    with Launched.torchrun(2, ["--help"], tmp_path / "here") as launch:
        ended = launch.wait()
    assert ended.code == 0, str(ended)
    assert ended.stdout.count("Groups, chosen as group=option") == 1


@pytest.mark.parametrize(
    ("rank", "printer", "does"),
    [
        (0, None, "prints"),
        (1, None, "waits and prints"),  # it is still there, so rank 0 did not see it
        (0, 0, "prints"),
        (1, 0, "waits"),
        (0, 1, "waits"),
        (1, 1, "prints"),
    ],
)
def test_who_prints_a_refusal(
    rank: int, printer: int | None, does: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []

    def exit_instead(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", exit_instead)
    monkeypatch.setattr(time, "sleep", waited.append)
    launch = Launch(rank, rank, 2, 2, 1, torchrun=True)
    with pytest.raises(SystemExit) as ended:
        command._refuse("train", "two\nlines", launch, printer=printer)
    assert ended.value.code == 2
    assert capsys.readouterr().err == ("scaling.train: error: two lines\n" if "prints" in does else "")
    assert bool(waited) == ("waits" in does)


# ---- pieces


def test_flags_come_first_and_keep_their_values() -> None:
    line = CommandLine.of("train", ["model=gpt2", "-c", "job", "seed=1", "--resolve", "data.path=a b"])
    assert line.flags == ["--cfg=job", "--resolve"]
    assert line.overrides == ["model=gpt2", "seed=1", "data.path=a b"]


def test_the_command_that_repeats_a_run_can_be_pasted() -> None:
    argv = ["model=gpt2", "data.path='a b'"]
    assert repeat_command("train", PLAIN, argv) == """python -m scaling.train model=gpt2 'data.path='"'"'a b'"'"''"""
    assert repeat_command("train", PLAIN, []) == "python -m scaling.train"
    four = Launch(1, 1, 4, 2, 2, torchrun=True)
    assert repeat_command("train", four, ["seed=1"]) == "torchrun --nnodes=2 --nproc_per_node=2 -m scaling.train seed=1"
