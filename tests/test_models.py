"""The models people know: published sizes, counted FLOPs, and what checkpointing and layout change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import model
from torch import Tensor

from scaling.config import conf_dir
from scaling.measure.collectives import Recorder
from scaling.workload import Workload, build
from scaling.workload.attention import attention, takes_groups
from scaling.workload.checkpointing import checkpoint_blocks
from scaling.workload.flops import count_flops
from scaling.workload.layout import arrange, helps, lay_out

CPU = torch.device("cpu")
# Parameters as published: GPT-2, Llama and BERT by the checkpoints of their authors, ResNet-50 by torchvision.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "bert_large": 335_174_458,
    "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248,
    "resnet50": 25_557_032,
}
GFLOP = {"resnet50": 24.3, "bert_large": 1104, "gpt2": 875}  # forward + backward of one sample
TINY = ("gpt_tiny", "llama_tiny", "bert_tiny", "resnet_tiny")
NAMES = sorted(file.stem for file in (conf_dir() / "model").glob("*.yaml") if file.stem != "custom")


def samples(workload: Workload, count: int = 2) -> dict[str, Tensor]:
    made = workload.synthetic(count, torch.Generator().manual_seed(0))
    return arrange(made, workload)


def gradients(workload: Workload) -> dict[str, Tensor]:
    workload.loss(workload.module, samples(workload))[0].backward()
    return {name: p.grad for name, p in workload.module.named_parameters() if p.grad is not None}


def test_every_model_builds_on_meta_with_its_size_and_flops(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for name in NAMES:
        workload = build(model(name), "meta", seed=0)
        flops, recomputed = count_flops(model(name), 1), count_flops(model(name), 1, checkpointing=True)
        assert flops is not None and recomputed is not None, name
        assert 1.1 * flops < recomputed < 4 / 3 * flops, name  # at most one more forward
        if name in PUBLISHED:
            assert workload.parameters == PUBLISHED[name], name
        if name in GFLOP:
            assert flops / 1e9 == pytest.approx(GFLOP[name], rel=1e-3), name
        rows.append(f"{name:12}{workload.parameters:>15,}{flops / 1e9:>16,.3f}{recomputed / 1e9:>16,.3f}")
    assert {*PUBLISHED, *TINY} <= set(NAMES)
    with capsys.disabled():
        print(f"\n{'model':12}{'parameters':>15}{'GFLOP/sample':>16}{'checkpointed':>16}", *rows, sep="\n")


def test_flops_of_a_small_llama_by_hand() -> None:
    layers, hidden, heads, groups, mlp, vocabulary, length = 4, 128, 4, 2, 384, 256, 128
    narrow = hidden // heads * groups  # keys and values
    products = layers * (2 * hidden * hidden + 2 * hidden * narrow + 3 * hidden * mlp) + vocabulary * hidden
    forward = 2 * length * (products + layers * 2 * length * hidden)
    assert count_flops(model("llama_tiny"), 3) == 3 * 3 * forward


def test_recomputation_stops_with_what_backward_needs() -> None:
    # Of each block all but the last product runs again: its output is no input of backward.
    layers, hidden, length = 4, 128, 128
    again = layers * (2 * length * (3 + 1 + 4) * hidden * hidden + 2 * 2 * length * length * hidden)
    model_flops, hardware_flops = (count_flops(model("gpt_tiny"), 1, checkpointing=c) or 0 for c in (False, True))
    assert hardware_flops - model_flops == again


@pytest.mark.parametrize("name", TINY)
def test_checkpointing_changes_no_gradient(name: str) -> None:
    plain, checkpointed = build(model(name), CPU, 0), build(model(name), CPU, 0)
    checkpoint_blocks(checkpointed)
    expected, found = gradients(plain), gradients(checkpointed)
    assert list(expected) == list(found) == [n for n, _ in plain.module.named_parameters()]
    for parameter, gradient in expected.items():
        assert torch.equal(gradient, found[parameter]), parameter


def test_checkpointing_runs_each_block_twice_and_keeps_less() -> None:
    workload = build(model("gpt_tiny"), CPU, 0)
    calls: list[str] = []
    block = next(m for m in workload.module.modules() if isinstance(m, workload.block_types))
    forward = block.forward
    block.forward = lambda *args, **kwargs: (calls.append("run"), forward(*args, **kwargs))[1]  # type: ignore[func-returns-value]
    gradients(workload)
    assert len(calls) == 1
    checkpoint_blocks(workload)
    gradients(workload)
    assert len(calls) == 3


def test_checkpointing_compiles_to_the_same_loss() -> None:
    plain, compiled = build(model("llama_tiny"), CPU, 0), build(model("llama_tiny"), CPU, 0)
    checkpoint_blocks(compiled)
    compiled.module.compile(backend="aot_eager")
    expected, found = gradients(plain), gradients(compiled)
    for name, gradient in expected.items():
        assert torch.allclose(gradient, found[name], rtol=1e-4, atol=1e-5), name


def test_a_model_without_blocks_cannot_be_checkpointed() -> None:
    with pytest.raises(ValueError, match=r"checkpointing=true: the model has no blocks to recompute .*none"):
        checkpoint_blocks(Workload(torch.nn.Linear(1, 1), lambda m, t: (m(t["x"]).sum(), 1), lambda n, g: {}, ()))


@pytest.mark.parametrize("name", TINY)
def test_no_forward_makes_the_host_wait(name: str) -> None:
    workload = build(model(name), CPU, 0)
    tensors = samples(workload)
    with Recorder() as recorder:
        workload.loss(workload.module, tensors)[0].backward()
    assert recorder.host_syncs == 0


@pytest.mark.parametrize("name", TINY)
def test_the_loss_is_a_sum_over_samples_and_starts_at_chance(name: str) -> None:
    workload = build(model(name), CPU, 0)
    workload.module.eval()
    tensors = samples(workload, 4)
    with torch.no_grad():
        total, count = workload.loss(workload.module, tensors)
        parts = [workload.loss(workload.module, {k: t[i : i + 1] for k, t in tensors.items()}) for i in range(4)]
    assert float(total) == pytest.approx(sum(float(part) for part, _ in parts), rel=1e-5)
    assert int(count) == sum(int(part) for _, part in parts)
    chance = torch.tensor(float(workload.vocabulary or workload.classes or 0)).log()
    assert float(total) / int(count) == pytest.approx(float(chance), rel=0.15)


def test_bert_sees_both_sides_and_no_padding() -> None:
    module = build(model("bert_tiny"), CPU, 0).module.eval()
    tokens = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(0))
    later, padded = tokens.clone(), tokens.clone()
    later[0, 31] = (later[0, 31] + 1) % 256
    padded[0, 20:] = 0
    attended = (torch.arange(32) < 20)[None, None, None, :]
    with torch.no_grad():
        whole = module(input_ids=tokens).logits
        assert not torch.allclose(whole[:, :10], module(input_ids=later).logits[:, :10])  # the future is seen
        short = module(input_ids=tokens[:, :20]).logits
        masked = module(input_ids=padded, attention_mask=attended).logits[:, :20]
    assert torch.allclose(short, masked, atol=1e-5)


def test_the_loss_of_bert_hides_its_padding() -> None:
    workload = build(model("bert_tiny"), CPU, 0)
    workload.module.eval()
    whole = samples(workload, 1)
    short = {name: tensor[:, :40] for name, tensor in whole.items()}
    padded = {name: tensor.clone() for name, tensor in whole.items()} | {"attended": (torch.arange(128) < 40)[None]}
    padded["inputs"][:, 40:], padded["targets"][:, 40:] = 0, -100
    with torch.no_grad():
        expected, count = workload.loss(workload.module, short)
        found, same = workload.loss(workload.module, padded)
    assert int(count) == int(same) > 0
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_llama_is_causal_with_fewer_key_heads() -> None:
    module = build(model("llama_tiny"), CPU, 0).module.eval()
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    with torch.no_grad():
        before, after = module(input_ids=tokens).logits, module(input_ids=changed).logits
    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize(
    ("device", "dtype", "has_flash", "taken"),
    [
        ("cuda", torch.bfloat16, True, True),
        ("cuda", torch.float16, True, True),
        ("cuda", torch.float32, True, False),  # no fused kernel there takes groups, and plain products need gigabytes
        ("cuda", torch.float16, False, False),  # V100
        ("xpu", torch.bfloat16, False, False),
        ("cpu", torch.float32, False, True),
    ],
)
def test_key_heads_are_repeated_where_no_fused_kernel_takes_groups(
    device: str, dtype: torch.dtype, has_flash: bool, taken: bool
) -> None:
    value: Any = SimpleNamespace(device=torch.device(device), dtype=dtype, is_cuda=device == "cuda")
    assert takes_groups(value, has_flash) is taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeated_key_heads_give_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 8, 16, generator=draw)  # float32, as rotary embeddings leave it under autocast
    key, value = (torch.randn(2, 2, 8, 16, generator=draw) for _ in range(2))
    module = SimpleNamespace(is_causal=True, config=SimpleNamespace())
    grouped, _ = attention(module, query, key, value.to(dtype), None)
    monkeypatch.setattr("scaling.workload.attention.takes_groups", lambda value, has_flash: False)
    repeated, _ = attention(module, query, key, value.to(dtype), None)
    assert grouped.dtype == repeated.dtype == dtype
    assert torch.allclose(grouped.float(), repeated.float(), atol=1e-6 if dtype == torch.float32 else 2e-2)


def test_our_attention_is_transformers_own_to_rounding() -> None:
    for name in ("gpt_tiny", "llama_tiny", "bert_tiny"):
        module: Any = build(model(name), CPU, 0).module.eval()
        tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            ours = module(input_ids=tokens).logits
            module.config._attn_implementation = "eager"
            assert torch.allclose(ours, module(input_ids=tokens).logits, atol=1e-5), name


def test_images_lie_channels_last_where_it_helps() -> None:
    assert helps(CPU, "fp32") and helps(torch.device("cuda"), "bf16") and helps(torch.device("cuda"), "tf32")
    assert not helps(torch.device("cuda"), "fp32") and not helps(torch.device("xpu"), "bf16")
    plain = lay_out(build(model("resnet_tiny"), CPU, 0), False, CPU, "fp32")
    last = lay_out(build(model("resnet_tiny"), CPU, 0), None, CPU, "fp32")
    assert (plain.channels_last, last.channels_last) == (False, True)
    for workload, form in ((plain, torch.contiguous_format), (last, torch.channels_last)):
        assert samples(workload)["images"].is_contiguous(memory_format=form)
        kernels = [p for p in workload.module.parameters() if p.dim() == 4 and p.shape[2] > 1]
        assert kernels and all(p.is_contiguous(memory_format=form) for p in kernels)
    expected, found = gradients(plain), gradients(last)
    for name, gradient in expected.items():
        assert torch.allclose(gradient, found[name], rtol=1e-3, atol=1e-4), name


def test_a_model_without_images_has_no_layout() -> None:
    workload = build(model("gpt_tiny"), CPU, 0)
    assert lay_out(workload, None, CPU, "fp32").channels_last is None
    with pytest.raises(ValueError, match=r"model.channels_last=true: this model takes no images"):
        lay_out(workload, True, CPU, "fp32")


def test_batch_statistics_are_known_from_the_model() -> None:
    assert build(model("resnet_tiny"), "meta", 0).batch_statistics
    assert not any(build(model(name), "meta", 0).batch_statistics for name in ("gpt_tiny", "bert_tiny", "llama_tiny"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("resnet_tiny", {"dropout": 0.1}, "model.dropout=0.1: a ResNet has none"),
        ("resnet_tiny", {"image_size": 16}, "model.image_size=16: must be at least 32"),
        ("resnet_tiny", {"sequence_length": 8}, "model.sequence_length=8: .*resnet takes no sequence_length"),
        ("gpt_tiny", {"image_size": 64}, "model.image_size=64: .*gpt2 takes no image_size"),
        ("bert_tiny", {"sequence_length": 129}, "model.sequence_length=129: this BERT has 128 positions"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(model(name, **changes), "meta", 0)


@pytest.mark.parametrize(
    ("name", "argument", "value", "message"),
    [
        ("llama_tiny", "key_value_heads", 3, "heads=4 does not divide by key_value_heads=3"),
        ("llama_tiny", "mlp_size", 0, "mlp_size=0: must be a whole number"),
        ("bert_tiny", "vocabulary", 256, "vocabulary=256: must hold 256 bytes and a token that masks them"),
        ("resnet_tiny", "block", "wide", "block=wide: choose one of basic, bottleneck"),
        ("resnet_tiny", "depths", [1, 1], "2 depths for 4 channels"),
        ("resnet_tiny", "depths", 3, "depths=3 and channels=.* have to be lists"),
        ("resnet_tiny", "block", ["basic"], "choose one of basic, bottleneck"),
        ("resnet50", "channels", [255, 512, 1024, 2048], "a bottleneck has a quarter of them inside"),
        ("llama_tiny", "rope", 3, "model.args.rope=3: has to hold rope_type"),
        ("llama_tiny", "tied_embeddings", "maybe", "tied_embeddings=maybe: has to be true or false"),
        ("llama_tiny", "hidden_size", 12, r"a head of 3 \(hidden_size / heads\) has to be even"),
        ("resnet_tiny", "depths", [1, 1, 1, True], "depths=True: must be a whole number"),
    ],
)
def test_arguments_that_make_no_model_are_named(name: str, argument: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(model(name, args=model(name).args | {argument: value}), "meta", 0)


def test_images_are_normalised_as_published_resnets_want_it() -> None:
    module: Any = build(model("resnet_tiny"), CPU, 0).module.eval()
    seen: list[Tensor] = []
    module.network.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    colour = torch.tensor([[0.485, 0.456, 0.406], [0.485 + 0.229, 0.456 + 0.224, 0.406 + 0.225]]) * 255
    module(colour.round().to(torch.uint8)[:, :, None, None].expand(2, 3, 64, 64))
    assert torch.allclose(seen[0].mean(dim=(2, 3)), torch.tensor([[0.0] * 3, [1.0] * 3]), atol=0.01)
