"""Secure aggregation: the server learns sums over many clients, and nothing else of any client's vector.

Clients agree on pairwise masks that cancel in the sum, add one of their own, and hand out shares of the secrets behind
both, so that the sum can be unmasked whichever clients leave on the way. Integers modulo 2³², so sums are exact.

- :mod:`.messages`: messages and their parser;
- :mod:`.keys`: identities, trust, and keys of a round;
- :mod:`.segments`: which segments clients of a size own, and when a size is too thin;
- :mod:`.masking`, :mod:`.shamir`: masks, the graph, and secret sharing;
- :mod:`.client`, :mod:`.server`: the two sides, as state machines that read and write messages;
- :mod:`.folder`: what a client keeps on its disk.

docs/privacy-protocol.md states the assumptions and what is not covered. Neither torch nor Flower is needed here.
"""
