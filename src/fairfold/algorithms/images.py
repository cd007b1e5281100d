"""Networks of images by gradient: the same steps as recommenders', on images and their labels."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from fairfold.algorithms.gradient import Descending


class Images(Descending):
    """E epochs of gradient steps on a device's images; defaults are those of the paper's experiment on them."""

    images: ClassVar[bool] = True
    DEFAULTS: ClassVar = {
        "fleet": {"clients_per_round": 10},
        "run": {"rounds": 200},
        "subspace": {"compress": "all", "mapping": "chunk"},
    }

    kind: Literal["images"] = "images"
    local_epochs: int = Field(20, ge=1, lt=2**31)
    batch_size: int = Field(64, ge=1, lt=2**31)
    local_optimiser: Literal["sgd", "adagrad", "adam"] = "adam"
    local_step: float = Field(0.01, gt=0)
    weighting: Literal["data", "equal"] | float = Field("data", union_mode="left_to_right")
    aggregation: Literal["paper", "delta"] = "paper"

    def problem_with(self, settings: Any) -> str | None:
        mapping, compress = getattr(settings.subspace, "mapping", ""), getattr(settings.subspace, "compress", "all")
        if mapping == "ranked":
            return f"weights of model.kind={settings.model.kind!r} have no order of popularity: use mapping='chunk'"
        if compress == "tables":
            return f"model.kind={settings.model.kind!r} has no item tables: use subspace.compress='all' or 'model'"
        return super().problem_with(settings)
