"""The seam between mathematics and speed: what layers above call, and which body serves it.

Every operation has its specification in :mod:`fairfold.kernels.reference`. Arguments are trusted here (lengths, dtypes
and ranges were checked by the caller).
"""

from fairfold.kernels.reference import (
    accumulate_range,
    accumulate_rows,
    count_range,
    recover_range,
    recover_rows,
)

__all__ = ["accumulate_range", "accumulate_rows", "count_range", "recover_range", "recover_rows"]
