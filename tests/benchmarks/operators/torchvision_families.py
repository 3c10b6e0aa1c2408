"""Small models of torchvision's families, by its own classes, for families.py: widths and depths cut down, no download.

Of AlexNet and VGG the two wide layers of the classifier are narrowed, too: they hold most of the memory and no other
operator. Detection and optical flow depend on values of tensors and are left out.
"""

import functools

import torch
import torchvision.models as tv
from torchvision.models import convnext, efficientnet, regnet, resnet, swin_transformer, vgg, video

CLASSES = {"num_classes": 16}
GRADUAL = functools.partial(torch.randn, dtype=torch.float64)


class Pictures(torch.nn.Module):
    """A torchvision model called as families.py calls one of transformers."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        for weight in model.parameters():
            if weight.dim() > 1 and not weight.any():  # a head of zeros passes nothing on to compare
                torch.nn.init.normal_(weight, std=0.1)

    def forward(self, pixel_values, return_dict=True):
        made = self.model(pixel_values)
        return (made["out"] if isinstance(made, dict) else made,)


def of(make, *shape):
    return lambda: (Pictures(make()), {"pixel_values": GRADUAL(*(shape or (4, 3, 64, 64)))})


def narrowed(model, classifier):
    model.classifier = classifier
    return model


def wide_layers(inside):
    linear = torch.nn.Linear
    return torch.nn.Sequential(
        torch.nn.Dropout(), linear(inside, 64), torch.nn.ReLU(), torch.nn.Dropout(), linear(64, 64), torch.nn.ReLU(),
        linear(64, 16),
    )  # fmt: skip


def small_vgg():
    return vgg.VGG(vgg.make_layers([16, "M", 32, "M", 64, "M"], batch_norm=True), **CLASSES, init_weights=False)


def small_efficientnet():
    parts = [
        efficientnet.MBConvConfig(1, 3, 1, 16, 16, 1, 1.0, 1.0),
        efficientnet.MBConvConfig(4, 5, 2, 16, 24, 2, 1.0, 1.0),
    ]
    return tv.EfficientNet(parts, dropout=0.2, stochastic_depth_prob=0.2, **CLASSES)


def small_regnet():
    parts = regnet.BlockParams.from_init_params(depth=4, w_0=16, w_a=8.0, w_m=2.0, group_width=8, se_ratio=0.25)
    return tv.RegNet(parts, **CLASSES)


def small_swin(block, merging):
    return tv.SwinTransformer(
        [4, 4], 16, [1, 1], [2, 4], [4, 4], stochastic_depth_prob=0.1, **CLASSES, block=block, downsample_layer=merging
    )


def small_video():
    stem = video.resnet.BasicStem
    return tv.video.resnet.VideoResNet(
        video.resnet.BasicBlock, [video.resnet.Conv3DSimple] * 4, [1, 1, 1, 1], stem, **CLASSES
    )


FAMILIES = {
    "tv alexnet": of(lambda: narrowed(tv.alexnet(**CLASSES), wide_layers(9216))),
    "tv vgg": of(lambda: narrowed(small_vgg(), wide_layers(64 * 49))),
    "tv resnet": of(lambda: tv.ResNet(resnet.BasicBlock, [1, 1, 1, 1], **CLASSES)),
    "tv resnext": of(lambda: tv.ResNet(resnet.Bottleneck, [1, 1, 1, 1], groups=4, width_per_group=8, **CLASSES)),
    "tv squeezenet": of(lambda: tv.squeezenet1_1(**CLASSES)),
    "tv densenet": of(lambda: tv.DenseNet(8, (2, 2, 2, 2), 16, drop_rate=0.1, **CLASSES)),
    "tv googlenet": of(lambda: tv.googlenet(aux_logits=False, init_weights=False, **CLASSES)),
    "tv mobilenet v2": of(lambda: tv.mobilenet_v2(width_mult=0.25, **CLASSES)),
    "tv mobilenet v3": of(lambda: tv.mobilenet_v3_small(width_mult=0.25, **CLASSES)),
    "tv shufflenet": of(lambda: tv.shufflenet_v2_x0_5(**CLASSES)),
    "tv mnasnet": of(lambda: tv.mnasnet0_5(**CLASSES)),
    "tv efficientnet": of(small_efficientnet),
    "tv regnet": of(small_regnet),
    "tv convnext": of(
        lambda: tv.ConvNeXt(
            [convnext.CNBlockConfig(16, 32, 1), convnext.CNBlockConfig(32, None, 1)],
            stochastic_depth_prob=0.1,
            **CLASSES,
        )
    ),
    "tv vit": of(lambda: tv.VisionTransformer(32, 8, 2, 4, 32, 64, dropout=0.1, **CLASSES), 4, 3, 32, 32),
    "tv swin": of(lambda: small_swin(swin_transformer.SwinTransformerBlock, swin_transformer.PatchMerging)),
    "tv swin v2": of(lambda: small_swin(swin_transformer.SwinTransformerBlockV2, swin_transformer.PatchMergingV2)),
    "tv maxvit": of(lambda: tv.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.1, **CLASSES)),
    "tv lraspp": of(lambda: tv.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None, **CLASSES)),
    "tv video resnet": of(small_video, 4, 3, 4, 16, 16),
}
