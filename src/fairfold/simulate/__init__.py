"""Federations on one machine: ``loop`` reads like the paper's algorithms, ``batched`` gives the same numbers fast."""

import sys
from types import ModuleType
from typing import Any

from fairfold.simulate.run import simulate

__all__ = ["simulate"]


class _Callable(ModuleType):
    """``fairfold.simulate`` is this package and the function of the same name: calling either runs a federation."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return simulate(*arguments, **named)


sys.modules[__name__].__class__ = _Callable
