"""A small device: takes part in rounds of the default algorithm in plain Python, without torch, Flower or numpy.

It is one more body of what a client computes: messages, state file and updates are those of the worker
(:mod:`fairfold.flower.fleet.worker`), bit for bit, so that either may go on where the other ended. What it cannot
do itself (other algorithms) it leaves to the worker. docs/protocol.md specifies the messages.
"""
