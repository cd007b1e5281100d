"""MLP 784-512-10 for 28×28 images."""

from torch import Tensor, nn


class MLP(nn.Module):
    """One hidden layer, as in the paper's experiment on MNIST.

    Args:
        inputs: Pixels of an image.
        hidden: Units of the hidden layer.
        classes: Number of classes.
    """

    chain = ("hidden", "output")
    """Its layers, a rectifier between each and the next: all there is to know for a program that runs them itself."""

    def __init__(self, inputs: int = 784, hidden: int = 512, classes: int = 10) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [images, classes] of images of any shape with the right number of pixels."""
        logits: Tensor = self.output(self.hidden(images.flatten(1)).relu())
        return logits
