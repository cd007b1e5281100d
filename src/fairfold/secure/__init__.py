"""Sums over devices that the server sees alone: it learns nothing else of what a device says.

Devices agree on masks that cancel in the sum (pairwise masks), add one of their own, and hand out shares of what made
both, so that the sum comes out whoever leaves on the way. Integers modulo 2³², so sums are exact.

- :mod:`.messages`, :mod:`.reader`: what travels, and the one reader of it;
- :mod:`.keys`: who a device is, who vouches for it, and which keys serve for what;
- :mod:`.layout`: which words devices of a size say, and when a size is too thin;
- :mod:`.graph`: who is masked with whom;
- :mod:`.masks`, :mod:`.shamir`: the arithmetic;
- :mod:`.device`, :mod:`.server`: the two sides, as machines that read and write messages;
- :mod:`.folder`: what a device keeps on its disk.

What is assumed and what is not covered stands in docs/privacy-protocol.md. No torch and no Flower is needed here.
"""
