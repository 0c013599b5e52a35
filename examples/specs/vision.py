"""Models of timm and torchvision for the specs beside this file, with random weights, nothing marked.

ppdsl check examples/specs/resnet50.ppspec --model examples/specs/vision.py:resnet50

Needs timm and torchvision: pip install 'ppdsl[vision]'
"""

import torch
from torch.nn import functional as F

SIDE, CLASSES = 64, 5


def made(build, rows):
    """The model in double precision, in train mode, one micro-batch and its loss."""
    torch.manual_seed(0)
    model = build().double().train()
    for module in model.modules():
        # Fresh norms make a layer blind to the scale of the one before: gradients that are zero but for rounding.
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    images = torch.randn(rows, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1)).double()
    return {"model": model, "args": (images,), "loss": F.cross_entropy, "targets": (torch.arange(rows) % CLASSES,)}


def resnet50(rows=2):
    """timm's ResNet-50."""
    import timm

    return made(lambda: timm.create_model("resnet50", num_classes=CLASSES), rows)


def convnext(rows=2):
    """timm's smallest ConvNeXt."""
    import timm

    return made(lambda: timm.create_model("convnext_atto", num_classes=CLASSES), rows)


def hrnet(rows=2):
    """timm's HRNet: up to four resolutions side by side, exchanged again and again."""
    import timm

    return made(lambda: timm.create_model("hrnet_w18_small", num_classes=CLASSES), rows)


def densenet(rows=2):
    """torchvision's DenseNet in small: every layer reads what all layers before it made."""
    import torchvision

    return made(lambda: torchvision.models.DenseNet(8, (4, 6, 8, 4), 16, bn_size=2, num_classes=CLASSES), rows)
