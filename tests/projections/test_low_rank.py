"""Factors are no summands: what adds up over devices is what they stand for, whatever the devices count."""

import pytest
import torch

from fairfold.projections import LowRank, Part
from fairfold.protocol.words import Answer, Sent, Totals


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (3.0, 120.0, 7.5), (2.0, 0.0, 4.0)])
def test_products_are_averaged_by_what_devices_count(weights: tuple[float, ...]) -> None:
    held, totals = LowRank((6, 4), 2), Totals()
    sent = Sent(0, 0, {"item": held}, {"item": torch.zeros(held.size)})
    devices = [torch.randn(held.size, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    for vector, weight in zip(devices, weights, strict=True):
        totals.add(sent, Answer({"item": vector * weight}, weight))
    ((_, answer),) = totals.parts()
    mean = LowRank.mean(torch.zeros(24), [Part(held, answer.sums["item"], answer.weight)], changes=False)
    products = torch.stack([held.recover(vector) for vector in devices])
    torch.testing.assert_close(mean, torch.tensor(weights) @ products / sum(weights))
