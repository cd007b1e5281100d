"""Three lines in a notebook: interactions in any form, a model of every size, and what it recommends.

The same recipe, rounds and files as ``fairfold train``; nothing is computed here that is not in ``simulate`` and
``runs``.
"""

from fairfold.fitting.hub import Pretrained, from_pretrained
from fairfold.fitting.model import Model, load
from fairfold.fitting.run import fit
from fairfold.fitting.suggest import Suggestions

__all__ = ["Model", "Pretrained", "Suggestions", "fit", "from_pretrained", "load"]
