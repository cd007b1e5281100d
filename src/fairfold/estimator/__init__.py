"""Three lines in a notebook: interactions in any form, a model of every size, and what it recommends.

The same recipe, rounds and files as ``fairfold train``; nothing is computed here that is not in ``simulate`` and
``runs``.
"""

from fairfold.estimator.evaluation import cross_validate
from fairfold.estimator.fitting import fit
from fairfold.estimator.hub import Pretrained, from_pretrained
from fairfold.estimator.model import Model, load
from fairfold.estimator.recommendations import Recommendations

__all__ = ["Model", "Pretrained", "Recommendations", "cross_validate", "fit", "from_pretrained", "load"]
