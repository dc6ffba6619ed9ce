"""Architectures of torchvision and timm, tiny: each as its authors wrote it, with random weights,
no dropout and no stochastic depth.  An image classifier each, unless it says otherwise.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from support.layouts.plain_loop import Batch, Measure, sgd
from support.nets import vision
from support.nets.architecture import MICRO_BATCHES, Architecture

Make = Callable[[Any, int], nn.Module]

CLASSES = 8
OUTPUTS = {"*.weight": 0}


def images(generator: torch.Generator, samples: int, side: int) -> Batch:
    """Square images in three colours, and their classes."""
    return {
        "images": torch.randn(samples, 3, side, side, generator=generator),
        "labels": torch.randint(0, CLASSES, (samples,), generator=generator),
    }


def pixels(generator: torch.Generator, samples: int, side: int) -> Batch:
    """Square images, and the class of every pixel."""
    labels = torch.randint(0, CLASSES, (samples, side, side), generator=generator)
    return {**images(generator, samples, side), "labels": labels}


def films(generator: torch.Generator, samples: int) -> Batch:
    """Four images of 16 x 16 pixels each, and their classes."""
    batch = images(generator, samples, 16)
    return {**batch, "images": torch.randn(samples, 3, 4, 16, 16, generator=generator)}


def classified(output: Any, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(output, batch["labels"])


def with_aids(output: Any, batch: Batch) -> Tensor:
    """GoogLeNet's: two classifiers in its midst learn along."""
    main, *aids = (classified(logits, batch) for logits in output)
    return main + 0.3 * sum(aids)


def segmented(output: Any, batch: Batch) -> Tensor:
    return classified(output["out"], batch)


def _made(layers: int, library: str, make: Make) -> nn.Module:
    vision.make_importable()
    return make(importlib.import_module(f"{library}.models"), layers)


def published(
    library: str,
    name: str,
    make: Make,
    side: int = 32,
    micro_batches: int = MICRO_BATCHES,
    batch: Callable[[torch.Generator, int], Batch] | None = None,
    loss: Measure = classified,
    split: Mapping[str, int] = OUTPUTS,
    lr: float = 0.1,
) -> Architecture:
    """A class of a library, made of its module `models` and a number of layers.

    micro_batches: 1 where batch norm takes statistics of each.
    """
    return Architecture(
        f"{library} {name}",
        partial(_made, library=library, make=make),
        batch or partial(images, side=side),
        split,
        {"x": "images"},
        loss,
        sgd(lr, 0.9, 1e-3),
        micro_batches,
    )


of_torchvision, of_timm = partial(published, "torchvision"), partial(published, "timm")


# ---- torchvision ---------------------------------------------------------------------------------


def _resnet(models: Any, layers: int) -> nn.Module:
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, layers], CLASSES)


def _mobilenet_v3(models: Any, layers: int) -> nn.Module:
    of = partial(models.mobilenetv3.InvertedResidualConfig, dilation=1, width_mult=1.0)
    blocks = [of(8, 3, 16, 8, False, "RE", 2)]
    blocks += [of(8, 3, 16, 8, True, "HS", 1) for _ in range(layers)]
    return models.MobileNetV3(blocks, 16, CLASSES, dropout=0.0)


def _efficientnet(models: Any, layers: int) -> nn.Module:
    of = models.efficientnet.MBConvConfig
    blocks = [of(1, 3, 1, 8, 8, 1, 1, 1), of(2, 3, 2, 8, 16, layers, 1, 1)]
    return models.EfficientNet(blocks, 0.0, 0.0, CLASSES, last_channel=16)


def _swin(models: Any, layers: int, second: bool) -> nn.Module:
    parts = models.swin_transformer
    kind = {"block": parts.SwinTransformerBlockV2, "downsample_layer": parts.PatchMergingV2}
    sizes = ([4, 4], 8, [2, layers], [2, 2], [2, 2])
    more = {"stochastic_depth_prob": 0.0, "num_classes": CLASSES, **(kind if second else {})}
    return models.SwinTransformer(*sizes, **more)


def _deeplab(models: Any, layers: int) -> nn.Module:
    parts = models.segmentation.deeplabv3
    kept = {"layer1": "out"}
    body = models._utils.IntermediateLayerGetter(_resnet(models, layers), kept)
    head = parts.DeepLabHead(64, CLASSES)
    head[0].project[3].p = 0.0
    return parts.DeepLabV3(body, head)


def _r2plus1d(models: Any, layers: int) -> nn.Module:
    parts = models.video.resnet
    makers = [parts.Conv2Plus1D] * 4
    return parts.VideoResNet(parts.BasicBlock, makers, [1] * 4, parts.R2Plus1dStem, CLASSES)


TORCHVISION: Mapping[str, Architecture] = {
    "tv_resnet": of_torchvision("ResNet", _resnet, 64, micro_batches=1, lr=0.01),
    "tv_densenet": of_torchvision(
        "DenseNet",
        lambda models, layers: models.DenseNet(4, (2, layers), 8, 2, num_classes=CLASSES),
        micro_batches=1,
    ),
    "tv_squeezenet": of_torchvision(
        "SqueezeNet", lambda models, layers: models.SqueezeNet("1_1", CLASSES, 0.0)
    ),
    "tv_mobilenet_v2": of_torchvision(
        "MobileNetV2",
        lambda models, layers: models.MobileNetV2(
            CLASSES, 0.25, [[1, 8, 1, 1], [6, 16, layers, 2]], dropout=0.0
        ),
        micro_batches=1,
    ),
    "tv_mobilenet_v3": of_torchvision("MobileNetV3", _mobilenet_v3, micro_batches=1),
    "tv_efficientnet": of_torchvision("EfficientNet", _efficientnet, micro_batches=1),
    "tv_shufflenet": of_torchvision(
        "ShuffleNetV2",
        lambda models, layers: models.ShuffleNetV2([1, 1, layers], [8, 8, 16, 32, 32], CLASSES),
        micro_batches=1,
    ),
    "tv_swin": of_torchvision("SwinTransformer", partial(_swin, second=False)),
    "tv_swin_v2": of_torchvision("SwinTransformer V2", partial(_swin, second=True)),
    "tv_googlenet": of_torchvision(
        "GoogLeNet",
        lambda models, layers: models.GoogLeNet(
            CLASSES, init_weights=False, dropout=0.0, dropout_aux=0.0
        ),
        64,
        loss=with_aids,
        micro_batches=1,
        lr=0.01,
    ),
    "tv_deeplab": of_torchvision(
        "DeepLabV3", _deeplab, batch=partial(pixels, side=32), loss=segmented, micro_batches=1
    ),
    "tv_video_resnet": of_torchvision(
        "VideoResNet", _r2plus1d, batch=films, micro_batches=1, lr=0.01
    ),
}

# ---- timm ----------------------------------------------------------------------------------------


def _mixer(models: Any, layers: int, gated: bool) -> nn.Module:
    parts = models.mlp_mixer
    gates = {"block_layer": parts.SpatialGatingBlock, "mlp_layer": parts.GatedMlp, "mlp_ratio": 2}
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": layers}
    return parts.MlpMixer(CLASSES, **sizes, **(gates if gated else {}))


def _repvgg(models: Any, layers: int) -> nn.Module:
    parts = models.byobnet
    blocks = tuple(parts.ByoBlockCfg("rep", d=d, c=c, s=2) for d, c in ((layers, 8), (1, 16)))
    return parts.ByobNet(parts.ByoModelCfg(blocks, stem_type="rep", stem_chs=8), CLASSES)


def _nfnet(models: Any, layers: int) -> nn.Module:
    parts = models.nfnet
    gates = {"attn_layer": "se", "attn_kwargs": {"rd_ratio": 0.5}}
    shape = parts.NfCfg((layers, 1, 1, 1), (8, 16, 16, 16), stem_chs=8, num_features=16, **gates)
    return parts.NormFreeNet(shape, CLASSES, drop_path_rate=0.0)


def _patches(layers: int, heads: int) -> dict[str, Any]:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_classes": CLASSES}
    return {**sizes, "depth": layers, "num_heads": heads}


def _levit(models: Any, layers: int) -> nn.Module:
    sizes = {"embed_dim": (8, 16), "key_dim": 4, "num_heads": (2, 2), "attn_ratio": (2, 2)}
    return models.levit.Levit(32, num_classes=CLASSES, depth=(layers, 1), **sizes)


def _pvt_v2(models: Any, layers: int) -> nn.Module:
    sizes = {"embed_dims": (8, 8, 16, 16), "num_heads": (1, 2, 2, 2), "sr_ratios": (2, 2, 1, 1)}
    more = {"depths": (layers, 1, 1, 1), "mlp_ratios": (2, 2, 2, 2), "num_classes": CLASSES}
    return models.pvt_v2.PyramidVisionTransformerV2(**sizes, **more)


def _sequencer(models: Any, layers: int) -> nn.Module:
    sizes = {"embed_dims": (8, 16), "hidden_sizes": (4, 4), "mlp_ratios": (2, 2)}
    more = {"layers": (1, layers), "patch_sizes": (8, 2)}
    return models.sequencer.Sequencer2d(CLASSES, 32, **sizes, **more)


TIMM: Mapping[str, Architecture] = {
    "mixer": of_timm("MlpMixer", partial(_mixer, gated=False)),
    "gmlp": of_timm("gMLP", partial(_mixer, gated=True)),
    "timm_deit": of_timm(
        "VisionTransformerDistilled",
        lambda models, layers: models.deit.VisionTransformerDistilled(**_patches(layers, 4)),
    ),
    "levit": of_timm("Levit", _levit, micro_batches=1, split={"stages.*.linear.weight": 0}),
    "repvgg": of_timm("RepVGG", _repvgg, micro_batches=1),
    "nfnet": of_timm("NormFreeNet", _nfnet),
    "xcit": of_timm(
        "Xcit",
        lambda models, layers: models.xcit.Xcit(**_patches(layers, 2), cls_attn_layers=1),
        micro_batches=1,
    ),
    "cait": of_timm("Cait", lambda models, layers: models.cait.Cait(**_patches(layers, 4))),
    "pvt_v2": of_timm("PyramidVisionTransformerV2", _pvt_v2),
    "convmixer": of_timm(
        "ConvMixer",
        lambda models, layers: models.convmixer.ConvMixer(8, layers, 3, 4, num_classes=CLASSES),
        micro_batches=1,
    ),
    "sequencer": of_timm("Sequencer2d", _sequencer),
}

VISION: Mapping[str, Architecture] = {**TORCHVISION, **TIMM}
