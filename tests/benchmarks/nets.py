"""Well-known nets in their published sizes; on "meta" they take no memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv_bn_relu(inner: int, outer: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outer), nn.ReLU())


class Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = conv_bn_relu(inner, width)
        self.conv = conv_bn_relu(width, width, 3, stride)
        self.expand = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm = nn.BatchNorm2d(4 * width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inner != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.expand(self.conv(self.reduce(x)))) + self.shortcut(x))


def resnet(blocks: tuple[int, ...] = (3, 4, 23, 3), classes: int = 1000) -> nn.Sequential:
    """He et al. 2015; the default is ResNet-101."""
    layers: list[nn.Module] = [conv_bn_relu(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    inner = 64
    for level, count in enumerate(blocks):
        for i in range(count):
            layers.append(Bottleneck(inner, 64 * 2**level, 2 if level and not i else 1))
            inner = 256 * 2**level
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))


class UNet(nn.Module):
    """The simplified U-Net (B, C) of the torchgpipe paper (Kim et al. 2020): five levels, of B
    convolutions each on the way down and on the way up; C channels at the first."""

    def __init__(self, convs: int = 5, channels: int = 64, depth: int = 5) -> None:
        super().__init__()
        widths = [channels * 2**i for i in range(depth)]
        inputs = [3, *widths[:-1]]
        self.down = nn.ModuleList(
            self._cell(a, b, b, convs) for a, b in zip(inputs, widths, strict=True)
        )
        self.bottom = self._cell(widths[-1], 2 * widths[-1], widths[-1], convs)
        self.up = nn.ModuleList(self._cell(2 * w, w // 2, w // 2, convs) for w in reversed(widths))
        self.out = nn.Conv2d(channels // 2, 1, 1, bias=False)

    @staticmethod
    def _cell(inner: int, middle: int, outer: int, convs: int) -> nn.Sequential:
        widths = [inner, *[middle] * (convs - 1), outer]
        layers: list[nn.Module] = []
        for i in range(convs):
            layers += [
                nn.Conv2d(widths[i], widths[i + 1], 3, padding=1, bias=False),
                nn.Dropout2d(0.1),
                nn.InstanceNorm2d(widths[i + 1]),
                nn.LeakyReLU(0.01),
            ]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for cell in self.down:
            skips.append(cell(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for cell in self.up:
            x = cell(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.out(x)


class Factorized(nn.Sequential):
    """A 1x7 and a 7x1 convolution, between two that make it narrow and wide."""

    def __init__(self, width: int, stride: int) -> None:
        narrow = width // 4
        super().__init__(
            conv_bn_relu(width, narrow),
            nn.Conv2d(narrow, narrow, (1, 7), (1, stride), (0, 3), bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, narrow, (7, 1), (stride, 1), (3, 0), bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )


def cell_operation(kind: str, width: int, stride: int) -> nn.Module:
    if kind == "max":
        return nn.MaxPool2d(3, stride, 1)
    if kind == "mean":
        return nn.AvgPool2d(3, stride, 1)
    if kind == "factorized":
        return Factorized(width, stride)
    if kind == "conv":
        return conv_bn_relu(width, width, 3, stride)
    return nn.Identity() if stride == 1 else conv_bn_relu(width, width, 1, stride)


class Cell(nn.Module):
    """Five sums of two operations each, on the two cells before and on each other's results."""

    NORMAL = (
        ((1, "point"), (1, "max")),
        ((1, "none"), (0, "factorized")),
        ((0, "point"), (0, "factorized")),
        ((2, "max"), (2, "none")),
        ((1, "mean"), (5, "point")),
    )
    REDUCTION = (
        ((0, "max"), (0, "max")),
        ((2, "none"), (1, "conv")),
        ((2, "factorized"), (2, "max")),
        ((3, "none"), (1, "max")),
        ((2, "mean"), (3, "point")),
    )

    def __init__(self, before: int, last: int, width: int, is_reduction: bool, shrink: int) -> None:
        super().__init__()
        self.recipe = self.REDUCTION if is_reduction else self.NORMAL
        self.last = conv_bn_relu(last, width)
        self.before = conv_bn_relu(before, width, 1, shrink)
        self.operations = nn.ModuleList(
            self._operation(kind, width, 2 if is_reduction and source < 2 else 1)
            for pair in self.recipe
            for source, kind in pair
        )
        self.outputs = (4, 5, 6) if is_reduction else (0, 3, 4, 6)

    @staticmethod
    def _operation(kind: str, width: int, stride: int) -> nn.Module:
        if kind == "point":
            return conv_bn_relu(width, width, 1, stride)
        return cell_operation(kind, width, stride)

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        states = [self.last(last), self.before(before)]
        for i, ((a, _), (b, _)) in enumerate(self.recipe):
            states.append(self.operations[2 * i](states[a]) + self.operations[2 * i + 1](states[b]))
        return torch.cat([states[i] for i in self.outputs], 1)


class AmoebaNet(nn.Module):
    """Like AmoebaNet-D (L, D) (Real et al. 2018): L normal cells in three groups, a reduction cell
    between groups and two at the front."""

    def __init__(self, layers: int = 18, filters: int = 256, classes: int = 1000) -> None:
        super().__init__()
        width = filters // 4
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        before = last = width
        shrink = 1
        cells = []
        plan = [True, True, *[False] * (layers // 3), True, *[False] * (layers // 3)]
        for is_reduction in [*plan, True, *[False] * (layers // 3)]:
            width *= 2 if is_reduction else 1
            cells.append(Cell(before, last, width, is_reduction, shrink))
            before, last = last, width * len(cells[-1].outputs)
            shrink = 2 if is_reduction else 1
        self.cells = nn.ModuleList(cells)
        self.head = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        before = last = self.stem(x)
        for cell in self.cells:
            before, last = last, cell(before, last)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(last, 1), 1))


def vgg16(classes: int = 1000) -> nn.Sequential:
    """Simonyan and Zisserman 2014."""
    layers: list[nn.Module] = []
    inner = 3
    for widths in ([64] * 2, [128] * 2, [256] * 3, [512] * 3, [512] * 3):
        for width in widths:
            layers += [nn.Conv2d(inner, width, 3, padding=1), nn.ReLU(inplace=True)]
            inner = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for width in (512 * 7 * 7, 4096):
        layers += [nn.Linear(width, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, classes))


class DenseNet(nn.Module):
    """Huang et al. 2016; the default is DenseNet-121."""

    def __init__(self, growth: int = 32, blocks: tuple[int, ...] = (6, 12, 24, 16)) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn_relu(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        width = 64
        self.blocks, self.between = nn.ModuleList(), nn.ModuleList()
        for level, count in enumerate(blocks):
            self.blocks.append(
                nn.ModuleList(
                    nn.Sequential(
                        conv_bn_relu(width + i * growth, 4 * growth),
                        nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
                    )
                    for i in range(count)
                )
            )
            width += count * growth
            if level < len(blocks) - 1:
                self.between.append(nn.Sequential(conv_bn_relu(width, width // 2), nn.AvgPool2d(2)))
                width //= 2
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            for layer in block:
                x = torch.cat([x, layer(x)], 1)
            if i < len(self.between):
                x = self.between[i](x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
