"""Which runs may stand in one ratio: the reasons why not, in words a reader can act on (docs/measuring.md, Scaling)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

from scaling.analysis.believable import refusals
from scaling.results.reader import Run, as_dict, as_list

Relation = Literal["weak", "strong", "both", "neither"]

SUMMARY_FIELDS = (
    "device_name",
    "model",
    "parameters",
    "sequence_length",
    "image_size",
    "precision",
    "parameter_dtype",
    "gather_dtype",
    "reduce_dtype",
    "optimizer",
    "compile",
    "checkpointing",
    "data",
    "threads",
    "cores_per_rank",
    "channels_last",
)
# The largest matrix-product rate is a property of the device. Cards of one model scatter by a few percent, and busy
# ranks of one host slow each other; a host on which other work runs shows here first.
EQUAL_RATES, COMPARABLE_RATES = 1.1, 1.5
TRANSPORT_VARIABLES = ("NCCL_", "GLOO_")
# None here is no other setting: nothing to gather or to reduce, a package unused, a layout that no record had yet.
NONE_MATCHES = ("parameter_dtype", "gather_dtype", "reduce_dtype", "versions.deepspeed", "channels_last")
# How a DeepSpeed file names the batch, which is compared as what makes a point.
DEEPSPEED_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

# Config keys that a difference in speed cannot come from, that follow from the swept field, or whose outcome is in
# the summary (`threads: null` and `threads: 1` may be the same run).
CONFIG_IGNORED = frozenset(
    {
        *("tracking", "timeout_s", "cluster", "study", "experiment"),
        *("device", "threads", "batch", "link", "compile", "checkpointing"),
        *("model.name", "model.sequence_length", "model.image_size", "model.micro_batch_size", "model.channels_last"),
        *("strategy.name", "data.name", "precision.name", "precision.reduce", "precision.gather", "optimizer.name"),
        "strategy.config",  # where a DeepSpeed file lies; what stands in it is strategy.settings
        *(f"strategy.settings.{key}" for key in DEEPSPEED_BATCH),
        "measure.matmul_rate",  # measured after the window
    }
)


def mismatches(run: Run, base: Run, apart: str | None = None) -> list[str]:
    """Name the fields in which two completed runs differ and must not, as "threads 1 vs 2" (run vs base).

    The field `apart`, and those below it as in "data.digest", are what the two are meant to differ in.
    """
    mine, other = compared_fields(run), compared_fields(base)
    reasons = []
    for name in mine | other:
        value, against = mine.get(name), other.get(name)
        if value == against or (name in NONE_MATCHES and None in (value, against)):
            continue
        if apart is not None and f"{name}.".startswith(f"{apart}."):
            continue
        if name.startswith("strategy.") and run.strategy != base.strategy:
            continue  # options of another strategy are not a setting of this one
        if _unknown(name, run) or _unknown(name, base):
            continue  # `refusals` says so once, instead of once per field
        reasons.append(f"{name} {_show(value)} vs {_show(against)}")
    if (rates := _matmul_rates(run, base)) and max(rates) > COMPARABLE_RATES * min(rates):
        reasons.append(
            f"matmul_tflops {rates[0]:.3g} vs {rates[1]:.3g}, so that the device itself was another or disturbed"
        )
    return reasons + _transport(run, base)


def compared_fields(run: Run) -> dict[str, Any]:
    """Collect every field that has to agree, flat: of the summary, the config, the versions, and the commit."""
    assert run.summary is not None
    fields = {name: run.summary[name] for name in SUMMARY_FIELDS}
    fields |= {key: value for key, value in run.settings.items() if not _is_ignored(key)}
    if run.summary["flops_per_step"] is not None:  # another model under one name
        fields["flops per sample"] = round(run.summary["flops_per_step"] / run.summary["global_batch_size"])
    fields |= {f"versions.{name}": version for name, version in as_dict(run.environment.get("versions")).items()}
    fields["model source"] = run.environment.get("model_source")
    fields["data.digest"] = as_dict(run.environment.get("data")).get("digest")
    if fields["data.digest"] is not None:  # the same data, wherever it lies
        fields.pop("data.path", None)
    if run.summary["peak_memory_gib"]["kind"] == "host_resident":
        fields["cores"] = as_list(run.environment.get("cores"))
    return fields | {"git.commit": as_dict(run.environment.get("git")).get("commit")}


def _is_ignored(key: str) -> bool:
    """Whether this config key, or a group that it lies in, has no say in whether runs are comparable."""
    parts = key.split(".")
    return any(".".join(parts[:end]) in CONFIG_IGNORED for end in range(1, len(parts) + 1))


def _unknown(name: str, run: Run) -> bool:
    if name in SUMMARY_FIELDS:
        return False
    return not (run.environment if name.startswith(("versions.", "git.")) else run.config)


def _show(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text[:12] if len(text) == 40 and " " not in text else text  # a commit is known by its first digits


def transport_variables(run: Run) -> dict[str, Any]:
    """The variables that choose or tune what carries the bytes."""
    variables = as_dict(run.environment.get("variables"))
    return {name: value for name, value in variables.items() if name.startswith(TRANSPORT_VARIABLES)}


def _transport(run: Run, base: Run) -> list[str]:
    """Compare what carried the bytes; one device sends nothing, so that it matches any transport."""
    assert run.summary is not None and base.summary is not None
    mine, other = run.summary["link"]["observed"], base.summary["link"]["observed"]
    if 1 in (run.world_size, base.world_size) or None in (mine, other) or mine == other:
        return []
    return [f"link.observed {mine} vs {other}"]


def remarks(run: Run, base: Run, role: str = "baseline") -> list[str]:
    """Say what does not forbid the ratio, and has to be said beside it; `role` is what the base is called there."""
    said = []
    git = [as_dict(one.environment.get("git")) for one in (run, base)]
    if any(one.get("dirty") for one in git):
        said.append(f"uncommitted changes on {_show(git[0].get('commit'))}")
    if None in [one.get("commit") for one in git]:
        said.append("commit unknown")
    if run.world_size != 1 and run.summary and run.summary["gradients_reduced"] is None:
        said.append("nobody checked that gradients were reduced")
    if run.world_size != 1 and run.summary and run.summary["parameters_agree"] is run.summary["gather_dtype"] is None:
        said.append("nobody checked that parameters agree")
    if run.summary and run.summary["batch_statistics"] and run.micro_batch_size != base.micro_batch_size:
        said.append("batch statistics over another micro-batch: not the same training")
    if (rates := _matmul_rates(run, base)) and max(rates) > EQUAL_RATES * min(rates):
        said.append(
            f"the device itself was not equally fast: matrix products at {rates[0]:.3g} vs {rates[1]:.3g} TFLOPS"
        )
    if (copies := computes_on_copies(run, base)) and base.summary:
        casts = f"the {role} casts {base.summary['parameter_dtype']} weights at each operation"
        said.append(f"computes on {copies} copies of the weights, {casts}")
    if others := other_hosts(run, base):
        said.append(f"{role} ran on another host ({', '.join(others)})")
    return said


NATIVE = {"bf16": "bfloat16", "fp16": "float16"}  # of a user's DeepSpeed file, which keeps weights of that type


def computes_on_copies(run: Run, base: Run) -> str | None:
    """Give the type of the weights' copies that a run computes on, where the other run makes none."""
    mine, other = _copies(run), _copies(base)
    return mine if other is None else None


def _copies(run: Run) -> str | None:
    """Give the type of weights that are kept to compute with beside those that are updated."""
    assert run.summary is not None
    native = [name for name in NATIVE if run.settings.get(f"strategy.settings.{name}.enabled") is True]
    copies = run.summary["gather_dtype"] or (NATIVE[native[0]] if native else None)
    return None if copies == run.summary["parameter_dtype"] else copies


def _matmul_rates(run: Run, base: Run) -> tuple[float, float] | None:
    """TFLOPS of plain matrix products that each run measured on its device, if both did."""
    rates = [one.summary["matmul_tflops"] for one in (run, base) if one.summary and one.summary["matmul_tflops"]]
    return (rates[0], rates[1]) if len(rates) == 2 else None


def other_hosts(run: Run, base: Run) -> list[str]:
    """Name the baseline's hosts that took no part in the run; empty where the run's are not recorded."""
    mine = _hosts(run)
    return [host for host in _hosts(base) if mine and host not in mine]


def _hosts(run: Run) -> list[str]:
    return sorted({str(host) for host in as_list(run.environment.get("hosts"))})


def batch_relation(run: Run, base: Run) -> Relation:
    """Compare batches. weak: work per device fixed (micro-batch and accumulation); strong: global batch fixed."""
    weak = (run.micro_batch_size, run.accumulation_steps) == (base.micro_batch_size, base.accumulation_steps)
    strong = run.global_batch_size == base.global_batch_size
    if weak and strong:
        return "both"
    return "weak" if weak else "strong" if strong else "neither"


def batch_change(run: Run, base: Run) -> str:
    """Say what of the batch changes from the baseline to the run, as "accumulation 64→1"; empty where nothing does."""
    pairs = {
        "micro-batch": (base.micro_batch_size, run.micro_batch_size),
        "accumulation": (base.accumulation_steps, run.accumulation_steps),
        "global batch": (base.global_batch_size, run.global_batch_size),
    }
    return ", ".join(f"{name} {old}→{new}" for name, (old, new) in pairs.items() if old != new)


def same_point(run: Run) -> str:
    """Make a key that only fresh repeats of one measurement share."""
    assert run.summary is not None
    link = run.summary["link"]
    arm = [link["requested"], link["observed"], run.summary["nodes"], transport_variables(run)]
    arm = [] if run.world_size == 1 else arm
    point = [run.strategy, run.world_size, run.micro_batch_size, run.accumulation_steps, run.global_batch_size, arm]
    return json.dumps([point, _hosts(run), compared_fields(run)], sort_keys=True, default=str)


def points(runs: Iterable[Run]) -> list[tuple[Run, ...]]:
    """Put repeats of one measurement together; a run that may stand in no ratio is a point of its own."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = f"{run.path}" if refusals(run) else same_point(run)
        groups.setdefault(key, []).append(run)
    return [tuple(group) for group in groups.values()]


def arms_with_one_transport(runs: Iterable[Run]) -> list[str]:
    """Name requested links that were all observed as one transport: a difference between such arms is no result."""
    arms: dict[str, set[str]] = {}
    for run in runs:
        if run.summary is None or run.world_size == 1 or run.summary["link"]["observed"] is None:
            continue
        link = run.summary["link"]
        point = [run.strategy, run.world_size, run.global_batch_size, run.micro_batch_size, compared_fields(run)]
        key = json.dumps([link["observed"], point], sort_keys=True, default=str)
        arms.setdefault(key, set()).add(link["requested"])
    pairs = {(tuple(sorted(asked)), json.loads(key)[0]) for key, asked in arms.items() if len(asked) > 1}
    return [
        f"links {' and '.join(asked)} were all observed as {seen}: not different arms" for asked, seen in sorted(pairs)
    ]
