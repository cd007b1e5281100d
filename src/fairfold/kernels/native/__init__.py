"""The CPU kernels in C: found, loaded and called through ctypes.

:func:`status` says whether they serve and, if not, why. Without them everything works in plain torch, slower. The
environment variable ``FAIRFOLD_NATIVE=0`` switches them off.
"""

from fairfold.kernels.native.loader import Status, status, use_instructions

__all__ = ["Status", "status", "use_instructions"]
