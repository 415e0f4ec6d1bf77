"""ResNets from transformers configs, randomly initialised, trained on image classification."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.models.resnet.modeling_resnet import ResNetBasicLayer, ResNetBottleNeckLayer

from scaling.workload import Tensors, Workload, check_sizes

# Per channel, of ImageNet's training images in [0, 1]: what published ResNets are trained with.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BLOCKS: dict[str, type[nn.Module]] = {"basic": ResNetBasicLayer, "bottleneck": ResNetBottleNeckLayer}
SMALLEST_IMAGE = 32  # the network halves an image five times


class Classifier(nn.Module):
    """A ResNet that takes images as loaders have them, [samples, 3, size, size] of uint8: fewer bytes to copy.

    They are normalised on the device.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: ResNetForImageClassification) -> None:
        super().__init__()
        self.network = network
        for name, values in (("mean", MEAN), ("deviation", DEVIATION)):
            self.register_buffer(name, 255 * torch.tensor(values).view(1, 3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, [samples, classes]."""
        logits: Tensor = self.network((images - self.mean) / self.deviation).logits
        return logits


def resnet(
    *,
    block: str,
    depths: list[int],
    stem_channels: int,
    channels: list[int],
    classes: int,
    image_size: int,
    dropout: float,
) -> Workload:
    """A ResNet v1.5 (strides in the 3 x 3 convolutions), He et al., 2015."""
    check_sizes(stem_channels=stem_channels, classes=classes)
    if not isinstance(block, str) or block not in BLOCKS:
        raise ValueError(f"model.args.block={block}: choose one of {', '.join(BLOCKS)}")
    if not isinstance(depths, list) or not isinstance(channels, list):
        raise ValueError(f"model.args: depths={depths} and channels={channels} have to be lists, one entry per stage")
    if len(depths) != len(channels) or not depths:
        raise ValueError(f"model.args: {len(depths)} depths for {len(channels)} channels; one of each per stage")
    for name, values in (("depths", depths), ("channels", channels)):
        for value in values:
            check_sizes(**{name: value})
    if block == "bottleneck" and any(value % 4 for value in channels):
        raise ValueError(f"model.args.channels={channels}: a bottleneck has a quarter of them inside")
    if image_size < SMALLEST_IMAGE:
        raise ValueError(f"model.image_size={image_size}: must be at least {SMALLEST_IMAGE}")
    if dropout:
        raise ValueError(f"model.dropout={dropout}: a ResNet has none")
    config = ResNetConfig(
        layer_type=block,
        depths=list(depths),
        embedding_size=stem_channels,
        hidden_sizes=list(channels),
        num_labels=classes,
    )
    return Workload(
        module=Classifier(ResNetForImageClassification(config)).train(),
        loss=classification_loss,
        synthetic=lambda samples, generator: _random_images(samples, image_size, classes, generator),
        block_types=(BLOCKS[block],),
        image_size=image_size,
        classes=classes,
    )


def classification_loss(module: nn.Module, tensors: Tensors) -> tuple[Tensor, int]:
    """Summed cross-entropy in fp32 of `images` with these `labels`, and the number of images."""
    logits, labels = module(tensors["images"]), tensors["labels"]
    return F.cross_entropy(logits.float(), labels, reduction="sum"), labels.numel()


def _random_images(samples: int, size: int, classes: int, generator: torch.Generator) -> Tensors:
    device, shape = generator.device, (samples, 3, size, size)
    return {
        "images": torch.randint(256, shape, dtype=torch.uint8, generator=generator, device=device),
        "labels": torch.randint(classes, (samples,), generator=generator, device=device),
    }
