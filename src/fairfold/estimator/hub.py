"""A model as a folder to share, in the form of the Hugging Face hub: a card, a configuration and safetensors.

It holds the model of one device size and the ids of the items, and no data of users; it recommends to new users by
their items. Nothing is sent: ``hf upload NAME FOLDER`` uploads the folder.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from fairfold import __version__, atomic_io
from fairfold.algorithms.cooccurrence.scorer import PAIRS, HistoryScoring, stored_scorer
from fairfold.checksums import read_errors
from fairfold.errors import InvalidCheckpoint, InvalidData, InvalidSettings
from fairfold.estimator.display import result_rows
from fairfold.estimator.inputs import IdIndex
from fairfold.estimator.recommendations import Recommendations
from fairfold.metrics.ranking import first_by_score
from fairfold.runs.device_model import DeviceModel, device_model, device_quality, read_device_model, write_device_model
from fairfold.runs.loaded import item_name
from fairfold.runs.units import human_bytes
from fairfold.subspace import Capacity
from fairfold.subspace.packed import QuantizedPairs

if TYPE_CHECKING:
    from fairfold.estimator.model import Model


WEIGHTS = "model.safetensors"
CONFIGURATION = "config.json"
CARD = "README.md"
KIND = "fairfold-items"
FORMAT = 1


@dataclass(frozen=True, repr=False)
class Pretrained:
    """A shared model of one device size: it recommends to new users by their items.

    Attributes:
        device: Its tensors and projections.
        items: Ids of the items, in the model's order.
        titles: Titles of the items, where they have any.
        config: Metric, quality, capacity and others.
    """

    device: DeviceModel
    items: list[Any]
    titles: list[str] | None
    config: dict[str, Any]

    def recommend(self, history: Any, k: int = 10) -> Recommendations:
        """The best ``k`` items for a user who has some: ``items, scores = model.recommend([3, 17])``."""
        numbers = torch.tensor(sorted({self._index[item] for item in history}), dtype=torch.int64)
        served = stored_scorer(self.device.projections, self.device.stored(), self.config["pair_weight"])
        scores = served.scores(served.histories([numbers]), torch.arange(len(self.items)))
        scores[0, numbers] = -torch.inf
        values, best = first_by_score(scores, min(k, len(self.items) - len(numbers)))
        chosen = best[0].tolist()
        titles = None if self.titles is None else numpy.array([self.titles[item] for item in chosen])
        note = "The model cannot use any of these items." if len(numbers) else "The most popular items."
        note = "" if bool((numbers < served.reach).any()) else note
        return Recommendations(numpy.array([self.items[item] for item in chosen]), values[0].numpy(), titles, note)

    def similar(self, item: Any, k: int = 10) -> Recommendations:
        """The items that are recommended to a user with this one alone."""
        return self.recommend([item], k)

    @cached_property
    def _index(self) -> IdIndex:
        return IdIndex("item", map(str, self.items), "Give known items.")

    def __repr__(self) -> str:
        config = self.config
        value = "" if config["quality"] is None else f", {config['metric']} {config['quality']:.4f}"
        size = f"{config['capacity']}, {config['bytes']:,} bytes"
        return f"<fairfold.Pretrained of {len(self.items):,} items, {size}{value}>"


def save_pretrained(model: Model, folder: str | Path, capacity: str = "1x", *, title: str = "") -> Path:
    """Write the folder; see :meth:`fairfold.estimator.Model.save_pretrained`."""
    run = model.run
    place = Path(folder)
    algorithm = run.plan.algorithm
    if not isinstance(algorithm, HistoryScoring):
        given = f"a model of algorithm.kind={algorithm.kind!r}, whose users are part of it"
        remedy = "Fit with recipe='default', or keep the whole run with model.save(path)."
        raise InvalidSettings(given, "one whose scores follow from histories by rows of items", remedy)
    if place.exists() and any(place.iterdir()):
        raise InvalidSettings(f"{place}, which holds something", "a new folder", "Name another, or empty it.")
    device = device_model(run, Capacity.parse(capacity))
    metric, own, server = device_quality(run, device)
    atomic_io.make_folder(place)
    size = write_device_model(run, device, place / WEIGHTS, (metric, own, server))
    data = model.data
    names = [item_name(number, data).removeprefix("#") for number in range(data.num_items)]
    config = {
        "library_name": "fairfold", "model_type": KIND, "format": FORMAT, "fairfold": __version__,
        "capacity": str(device.capacity), "bytes": size, "metric": metric,
        "quality": own if own is not None and math.isfinite(own) else None,
        "pair_weight": algorithm.pair_weight, "users": data.num_users,
        "items": [int(name) for name in names] if model.fitted.integer_ids[1] else names, "titles": data.titles,
    }  # fmt: skip
    atomic_io.write_atomically(place / CONFIGURATION, json.dumps(config, ensure_ascii=False, indent=1).encode())
    atomic_io.write_atomically(place / CARD, model_card(model, config, title or place.name).encode())
    return place


def from_pretrained(folder: str | Path) -> Pretrained:
    """Load a shared model of one size from its folder, or from a clone of the hub's.

    Example:
        >>> import fairfold, tempfile
        >>> readings = [(reader, book) for reader in range(20) for book in range(reader % 5, 40, 2)]
        >>> model = fairfold.fit(readings, capacities="1x-4x", rounds=2, progress=False)
        >>> shared = fairfold.from_pretrained(model.save_pretrained(tempfile.mkdtemp() + "/shared", "4x"))
        >>> len(shared.recommend([2, 4], k=3).items)
        3
    """
    place = Path(folder)
    if not (place / CONFIGURATION).is_file():
        remedy = "`hf download NAME --local-dir FOLDER` fetches one; a folder of model.save() is read by fairfold.load."
        raise InvalidData(f"{place}, without a {CONFIGURATION}", "a folder of model.save_pretrained", remedy)
    with read_errors(
        place / CONFIGURATION, InvalidCheckpoint, "the configuration of a shared model", "Fetch it again."
    ):
        config: dict[str, Any] = json.loads((place / CONFIGURATION).read_text(encoding="utf-8"))
        items, titles = list(config.pop("items")), config.pop("titles")
        kind = config["model_type"]
        version = config["format"]
        weight = float(config["pair_weight"])
    if (kind, version) != (KIND, FORMAT):
        raise InvalidCheckpoint(f"{place}: {kind}, format {version}", f"{KIND}, format {FORMAT}", "Update fairfold.")
    device, _ = read_device_model(place / WEIGHTS)
    known = device.projections.get(PAIRS)
    titled = titles is None or len(titles) == len(items)
    if not isinstance(known, QuantizedPairs) or known.items > len(items) or not titled:
        raise InvalidCheckpoint(f"{place}: {len(items)} items", "the names of the model's items", "Fetch it again.")
    return Pretrained(device, items, titles, config | {"pair_weight": weight})


def model_card(model: Model, config: dict[str, Any], title: str) -> str:
    """The model card: facts for the hub, a description, quality of every size, and an example."""
    result = model.result
    first = config["items"][:3]
    value = "" if config["quality"] is None else f"{config['quality']:.4f}"
    measured = [
        "model-index:", f"- name: {json.dumps(title)}", "  results:",
        "  - task: {type: recommendation, name: Recommendation}",
        f"    dataset: {{type: {json.dumps(model.data.name)}, name: {json.dumps(model.data.name)}}}",
        "    metrics:", f"    - {{type: ndcg, name: {json.dumps(config['metric'])}, value: {value}}}",
    ]  # fmt: skip
    rows = "\n".join(
        f"| {row['devices']} | {human_bytes(row['bytes_held'])} | {row[result.metric]:.4f} |"
        for row in result_rows(result, "sizes")
        if math.isfinite(row[result.metric])
    )
    baselines = "".join(f"\n| {name} | | {of:.4f} |" for name, of in result.baselines.items() if math.isfinite(of))
    notes = "\n".join(f"- {line}" for line in [*result.warnings, *result.notes])
    return f"""---
library_name: fairfold
tags: [recommendation, federated-learning, collaborative-filtering, fairfold]
{chr(10).join(measured) if value else ""}
---

# {title}

A recommender of {len(config["items"]):,} items, trained by a federation of {config["users"]:,} users with fairfold
{config["fairfold"]} ([FAIR: Federated Averaging in Random Subspaces](https://arxiv.org/abs/2311.01722)). This is the
model of a {config["capacity"]} device, {human_bytes(config["bytes"])}. It holds what was learned about items, and no
data of users; docs/privacy.md of fairfold says what sums over users reveal about them.

```python
import fairfold

model = fairfold.from_pretrained(".")  # this folder
items, scores = model.recommend({first!r}, k=10)  # for a user who has these items
```

| devices | memory | {config["metric"]}, all users |
|---|---|---|
{rows}{baselines}

Notes on the run:

{notes or "- None."}

`{WEIGHTS}` has the bytes of the device and in its header the settings of the run, `{CONFIGURATION}` the names of the
items in the model's order.
"""
