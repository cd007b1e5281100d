"""Names both sides of the network agree on. Nothing heavy is imported here."""

VERSION = 1
"""Raised whenever a message changes its meaning; both sides refuse any other."""

CAPACITY = "query.capacity"
"""Type of the message that asks a device what it can hold."""

ARRAYS = "arrays"
"""Record of the tensors: those a device is to train, or what it changed of them."""

FACTS = "fairfold"
"""Record of all else: version, round, hash, weight."""
