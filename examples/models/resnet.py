"""A residual network as a sequence of blocks, any of which may begin a stage."""

from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made), nn.ReLU(),
            nn.Conv2d(made, made, 3, 1, 1, bias=False), nn.BatchNorm2d(made),
        )  # fmt: skip
        self.beside = (
            nn.Identity()
            if given == made
            else nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))
        )

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.relu(self.inside(images) + self.beside(images))


def resnet(blocks: int, width: int, classes: int, channels: int = 3) -> nn.Sequential:
    """A residual network of three sizes of image, from [batch, channels, H, W] to logits.

    Args:
        blocks: Of each size.
        width: Channels of the first size; they double when the image's sides are halved.
        classes: Of images.
        channels: Of an image.
    """
    widths = [width * 2**size for size in range(3) for _ in range(blocks)]
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        ),
        *(
            Block(given, made, 1 if given == made else 2)
            for given, made in zip([width, *widths], widths, strict=False)
        ),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)),
    )
