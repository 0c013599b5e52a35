"""Models of timm and torchvision, narrow where the library lets us, with random weights and small images."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tests.zoo.case import Call, Case, Mark, cuts, weighted_squares

__all__ = ["VISION_CASES", "timm_case", "torchvision_case"]


def timm_case(name: str, model: str, marks: tuple[Mark, ...], **options: object) -> Case:
    """Return the case of a model that `timm.create_model` knows."""
    return _case(name, partial(_timm, model, **options), 64, marks)


def torchvision_case(name: str, model: str, marks: tuple[Mark, ...], **options: object) -> Case:
    """Return the case of a model that `torchvision.models.get_model` knows."""
    return _case(name, partial(_torchvision, model, **{"num_classes": 10, **options}), 64, marks, library="torchvision")


def _define_missing_operators() -> None:
    """Let torchvision import where its compiled part does not load: PyPI's is for CUDA, torch's may be for CPUs.

    No model here uses what it holds, but torchvision gives shapes to these two operators when it is imported.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        for library in Path(spec.origin).parent.glob("_C.*"):
            torch.ops.load_library(library)
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_define_missing_operators()


def _timm(name: str, **options: object) -> nn.Module:
    import timm  # the import takes seconds, and the package is absent beside some versions of torch

    return timm.create_model(name, pretrained=False, num_classes=10, **options)


def _torchvision(name: str, **options: object) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None, **options)


def _segmentation(name: str, **options: object) -> nn.Module:
    return _torchvision(name, weights_backbone=None, num_classes=4, **options)


def _densenet() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.DenseNet(8, (4, 6, 8, 4), 16, bn_size=2, drop_rate=0.1, num_classes=10)
    # Fresh norms make every layer blind to the scale of the one before: gradients that are zero but for rounding.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return model


def _swin() -> nn.Module:
    import torchvision

    return torchvision.models.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=16,
        depths=[2, 2, 2, 2],
        num_heads=[2, 2, 4, 4],
        window_size=[4, 4],
        dropout=0.1,
        stochastic_depth_prob=0.2,
        num_classes=10,
    )


def _images(microbatch: int, size: int) -> Call:
    generator = torch.Generator().manual_seed(200 + microbatch)
    return Call((torch.randn(2, 3, size, size, generator=generator),))


def _case(
    name: str, build: Callable[[], nn.Module], size: int, marks: tuple[Mark, ...], *, library: str = "timm"
) -> Case:
    return Case(name, build, partial(_images, size=size), marks, loss=weighted_squares, packages=(library,))


_tv_case = partial(_case, library="torchvision")

_SWIN_OPTIONS = {
    "img_size": 64,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 2, 2, 2),
    "num_heads": (2, 2, 4, 4),
    "drop_path_rate": 0.1,
}
_DENSE_LAYERS = (
    "features.denseblock2.denselayer3",
    "features.denseblock3.denselayer2",
    "features.denseblock3.denselayer6",
)
_GOOGLENET = partial(_torchvision, "googlenet", aux_logits=True, init_weights=False, num_classes=10)

VISION_CASES = (
    _case("timm_resnet50", partial(_timm, "resnet50"), 64, cuts("layer2", "layer3", "layer4")),
    _case(
        "timm_vit",
        partial(_timm, "vit_tiny_patch16_224", img_size=64, embed_dim=48, depth=4, drop_rate=0.1, drop_path_rate=0.1),
        64,
        cuts("blocks.1", "blocks.2", "blocks.3"),
    ),
    _case(
        "timm_convnext",
        partial(
            _timm, "convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 32, 64), drop_path_rate=0.1, ls_init_value=0.1
        ),
        64,
        cuts("stages.1", "stages.2", "stages.3"),
    ),
    _case(
        "timm_swin",
        partial(_timm, "swin_tiny_patch4_window7_224", **_SWIN_OPTIONS),
        64,
        cuts("layers.1", "layers.2", "layers.3"),
    ),
    _case(
        "timm_effnet",
        partial(_timm, "efficientnet_b0", drop_rate=0.1, drop_path_rate=0.1),
        64,
        cuts("blocks.2", "blocks.4", "blocks.6"),
    ),
    _case("timm_hrnet", partial(_timm, "hrnet_w18_small"), 64, cuts("stage2", "stage3", "stage4")),
    _tv_case(
        "tv_fcn",
        partial(_segmentation, "fcn_resnet50", aux_loss=True),
        64,
        cuts("backbone.layer2", "backbone.layer3", "classifier"),
    ),
    _tv_case(
        "tv_deeplab",
        partial(_segmentation, "deeplabv3_resnet50", aux_loss=False),
        64,
        cuts("backbone.layer2", "backbone.layer4", "classifier"),
    ),
    _tv_case(
        "tv_densenet",
        _densenet,
        64,
        cuts("features.denseblock2", "features.denseblock3", "features.denseblock4"),
    ),
    _tv_case("tv_densenet_cut_in_block", _densenet, 64, cuts(*_DENSE_LAYERS)),
    _tv_case("tv_googlenet", _GOOGLENET, 64, cuts("inception3a", "inception4a", "inception5a")),
    _tv_case(
        "tv_googlenet_branch_cut", _GOOGLENET, 64, cuts("inception4a", "inception4b.branch2", "inception4b.branch4")
    ),
    _tv_case(
        "tv_inception",
        partial(_torchvision, "inception_v3", aux_logits=False, init_weights=False, num_classes=10),
        96,
        cuts("Mixed_5b", "Mixed_6b", "Mixed_7a"),
    ),
    _tv_case("tv_swin", _swin, 64, cuts("features.2", "features.4", "features.6")),
)
