"""Networks for images: MLP 784-512-10 and LeNet."""

from torch import Tensor, nn
from torch.nn.functional import max_pool2d


class MLP(nn.Module):
    """One hidden layer, as in the paper's experiment on MNIST."""

    chain = ("hidden", "output")  # its layers, a rectifier between: all that a program that runs them has to know

    def __init__(self, inputs: int = 784, hidden: int = 512, classes: int = 10) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(inputs, hidden), nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [images, classes] of images of any shape with the right number of pixels."""
        logits: Tensor = self.output(self.hidden(images.flatten(1)).relu())
        return logits


class LeNet(nn.Module):
    """LeNet-5 for 28×28 images, with ReLU and maximum pooling, its usual form today (LeCun et al. 1998)."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        # Padding makes 28×28 what the original's 32×32 input was.
        self.first = nn.Conv2d(1, 6, kernel_size=5, padding=2)
        self.second = nn.Conv2d(6, 16, kernel_size=5)
        self.third, self.fourth = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84)
        self.output = nn.Linear(84, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [images, classes] of images [images, 28, 28] or [images, 1, 28, 28]."""
        grid = images.reshape(len(images), 1, 28, 28)
        grid = max_pool2d(self.first(grid).relu(), 2)
        grid = max_pool2d(self.second(grid).relu(), 2)
        units = self.third(grid.flatten(1)).relu()
        logits: Tensor = self.output(self.fourth(units).relu())
        return logits
