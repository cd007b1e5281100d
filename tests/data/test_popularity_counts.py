"""Ranks from the leading items alone: one numbering, both ways."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fairfold.data.interactions import items_at, ranks_of


@given(seed=st.integers(0, 2**32), items=st.integers(1, 60), share=st.floats(0, 1))
def test_leading_items_come_first_and_the_others_keep_their_order(seed: int, items: int, share: float) -> None:
    drawn = torch.randperm(items, generator=torch.Generator().manual_seed(seed))
    leading, others = drawn[: int(share * items)], drawn[int(share * items) :].sort().values
    order = torch.cat([leading, others])  # the numbering written out, of the catalogue's size
    everything = torch.arange(items)
    assert torch.equal(items_at(everything, leading.to(torch.int32)), order)
    assert torch.equal(ranks_of(everything, leading.to(torch.int32)), order.argsort())
