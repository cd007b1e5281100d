"""Triton's steps of a stacked cohort give what plain torch gives: on a GPU, else in Triton's interpreter."""

import os

import pytest
import torch

from fairfold.kernels.gpu import triton_problem

if (problem := triton_problem()) is not None:
    pytest.skip(problem, allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

from fairfold.backends.image_graph import linear_chain
from fairfold.backends.image_layers import LEFT, RIGHT, StackedTensor, stacked_network
from fairfold.kernels import training as reference
from fairfold.kernels.gpu import training
from fairfold.kernels.training import SlotTables
from fairfold.models import MLP


def tables(clients: int, pieces: int, slots: list[int], width: int, seed: int) -> SlotTables:
    """Random lists; every client has at most as many slots in use as it is given."""
    source = torch.Generator().manual_seed(seed)
    device = torch.device(DEVICE)
    found = SlotTables.empty(clients, max(slots), pieces * width, width, device)
    for client, used in enumerate(slots):
        slot = torch.randint(used, (pieces,), generator=source).to(device)
        signs = torch.randint(-1, 2, (pieces * width,), generator=source).to(device, torch.int8)
        found.set_client(client, SlotTables.of_client(slot, signs, max(slots)))
    return found


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("moments", [0, 1, 2])
def test_a_step_of_slots(moments: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MIN_PROGRAMS", 2)  # so that some take more than one turn
    clients, pieces, slots = 3, 300, [300, 9, 70]
    lists = tables(clients, pieces, slots, width, seed=moments)
    torch.manual_seed(1)
    start = torch.randn(clients, 300 * width, dtype=torch.float64, device=DEVICE)
    gradient = torch.randn(clients, pieces * width, dtype=torch.float64, device=DEVICE)
    rates = torch.tensor([[0.1, 0.5], [0.2, 0.7]], dtype=torch.float64, device=DEVICE)
    ends = []
    for body in (reference, training):
        full, values = torch.zeros_like(gradient), start.clone()
        kept = [torch.zeros_like(values) for _ in range(moments)]
        for number in range(2):
            which = torch.tensor([number], device=DEVICE)
            body.step_slots(full[:2], gradient[:2], values, kept, lists, rates, which)
        ends.append((full, values, *kept))
    for expected, found in zip(*ends, strict=True):
        torch.testing.assert_close(found, expected)
    assert torch.equal(ends[1][1][2], start[2])  # who does not take part does not move


@pytest.mark.parametrize("factored", [False, True])
def test_slopes_of_a_chain(factored: bool) -> None:
    clients, working, batch, images, inputs, hidden, classes, rank = 3, 2, 20, 50, 100, 40, 10, 5
    shapes = {"hidden.weight": (hidden, inputs), "hidden.bias": (hidden,), "output.weight": (classes, hidden),
              "output.bias": (classes,)}  # fmt: skip
    if factored:
        del shapes["hidden.weight"]
        shapes |= {"hidden.weight" + LEFT: (hidden, rank), "hidden.weight" + RIGHT: (rank, inputs)}
    torch.manual_seed(0)
    size = sum(torch.Size(shape).numel() for shape in shapes.values())
    weights = torch.randn(clients, size + 7, device=DEVICE) / 5
    pixels, labels = torch.rand(images, inputs, device=DEVICE), torch.randint(classes, (images,), device=DEVICE)
    rows = torch.randint(images, (4, clients, batch), device=DEVICE)
    shares = torch.rand(4, clients, batch, device=DEVICE)
    step = torch.tensor([2], device=DEVICE)
    ends = []
    for ours in (False, True):
        slopes, at, parts = torch.zeros_like(weights), 0, {}
        for name, shape in shapes.items():
            count = torch.Size(shape).numel()
            parts[name] = StackedTensor(
                *(of[:working, at : at + count].view(working, *shape) for of in (weights, slopes))
            )
            at += count
        if ours:
            batches = training.Batches(pixels, labels, rows, shares, step)
            training.chain_gradients(linear_chain(MLP.chain, parts), batches)
        else:
            with torch.device("meta"):
                network = stacked_network(MLP(inputs, hidden, classes), parts)
            chosen = rows[2, :working].reshape(-1)
            logits = network(pixels[chosen])
            losses = torch.nn.functional.cross_entropy(logits, labels[chosen], reduction="none")
            torch.autograd.backward(losses, shares[2, :working].reshape(-1))
        ends.append(slopes)
    assert not ends[1][working:].any()
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-5)
