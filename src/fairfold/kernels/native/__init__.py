"""The CPU kernels in C, called through ctypes; without them (or with ``FAIRFOLD_NATIVE=0``) plain torch serves."""

from fairfold.kernels.native.loader import Status, status, use_instructions

__all__ = ["Status", "status", "use_instructions"]
