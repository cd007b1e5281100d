"""A model's outline has the shapes of the model, takes no memory and asks torch's compiler for nothing."""

import subprocess
import sys

import torch

from fairfold.models import NeuMF
from fairfold.models.recommender import shapes_only


def test_shapes_without_numbers() -> None:
    real = NeuMF(5, 7, 4)
    state = torch.get_rng_state()
    with shapes_only():
        model = NeuMF(5, 7, 4)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn
    shapes = {name: tensor.shape for name, tensor in real.named_parameters()}
    assert {name: tensor.shape for name, tensor in model.named_parameters()} == shapes
    assert all(tensor.is_meta for tensor in model.parameters())
    model.load_state_dict(real.state_dict(), assign=True)
    users, items = torch.tensor([0, 4]), torch.tensor([6, 1])
    assert torch.equal(model(users, items), real(users, items))


def test_the_compiler_stays_away() -> None:
    code = (
        "import sys; from fairfold.models.recommender import shapes_only; from fairfold.models import NeuMF\n"
        "with shapes_only(): NeuMF(5, 7, 4)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
