"""A model as a folder to share, in the form of the Hugging Face hub: a card, a configuration and safetensors.

It holds what a device of one size holds and the names of the items, and nothing of any user; new users are recommended
to by their items. Nothing here speaks to a network: ``hf upload NAME FOLDER`` sends the folder.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from fairfold import files
from fairfold.algorithms.by_rows import ByRows, stored_model
from fairfold.algorithms.pair_architecture import LISTED
from fairfold.errors import InvalidCheckpoint, InvalidData, InvalidSettings, nearest
from fairfold.fitting.show import as_rows
from fairfold.fitting.suggest import Suggestions
from fairfold.metrics.ranking import first_by_score
from fairfold.runs.device import DeviceModel, device_model, quality, read_device_model, write_device_model
from fairfold.runs.opened import item_name
from fairfold.runs.units import human_bytes
from fairfold.sealed import reading
from fairfold.subspace import Capacity
from fairfold.version import __version__

if TYPE_CHECKING:
    from fairfold.fitting.model import Model

WEIGHTS, CONFIGURATION, CARD = "model.safetensors", "config.json", "README.md"
KIND = "fairfold-items"
FORMAT = 1


@dataclass(frozen=True, repr=False)
class Pretrained:
    """A model of one size that somebody has shared: it recommends to whoever names their items.

    Attributes:
        device: What it holds.
        items: Ids of the items, by the model's numbers.
        titles: Their names, where they have any.
        told: The configuration: metric, quality, capacity and others.
    """

    device: DeviceModel
    items: list[Any]
    titles: list[str] | None
    told: dict[str, Any]

    def recommend(self, history: Any, k: int = 10) -> Suggestions:
        """The best ``k`` items for a user who has some: ``items, scores = model.recommend([3, 17])``."""
        numbers = torch.tensor(sorted({self._number(item) for item in history}), dtype=torch.int64)
        if not len(numbers):
            raise InvalidData("an empty history", "at least one item", "Give the items that the user has.")
        served = stored_model(self.device.projections, self.device.stored(), self.told["pair_weight"])
        scores = served.scores(served.histories([numbers]), torch.arange(len(self.items)))
        scores[0, numbers] = -torch.inf
        values, best = first_by_score(scores, min(k, len(self.items) - len(numbers)))
        chosen = best[0].tolist()
        titles = None if self.titles is None else numpy.array([self.titles[item] for item in chosen])
        note = "" if bool((numbers < served.reach).any()) else "None of these items says what the user likes."
        return Suggestions(numpy.array([self.items[item] for item in chosen]), values[0].numpy(), titles, note)

    def similar(self, item: Any, k: int = 10) -> Suggestions:
        """The items that a user with this one alone would get."""
        return self.recommend([item], k)

    def _number(self, item: Any) -> int:
        if "_places" not in self.__dict__:  # made once: a dictionary of the whole catalogue
            object.__setattr__(self, "_places", {str(one): number for number, one in enumerate(self.items)})
        places: dict[str, int] = self.__dict__["_places"]
        word = str(item.item() if hasattr(item, "item") else item)
        if word not in places:
            some = ", ".join(list(places)[:3])
            raise InvalidData(f"item {item!r}{nearest(word, places)}", f"an item such as {some}", "Give known items.")
        return places[word]

    def __repr__(self) -> str:
        told = self.told
        value = "" if told["quality"] is None else f", {told['metric']} {told['quality']:.4f}"
        return f"<fairfold.Pretrained of {len(self.items):,} items, {told['capacity']}, {told['bytes']:,} bytes{value}>"


def save_pretrained(model: Model, folder: str | Path, capacity: str = "1x", *, title: str = "") -> Path:
    """Write the folder; see :meth:`fairfold.fitting.Model.save_pretrained`."""
    opened, place = model.opened, Path(folder)
    algorithm = opened.plan.algorithm
    if not isinstance(algorithm, ByRows):
        given = f"a model of algorithm.kind={algorithm.kind!r}, whose users are part of it"
        remedy = "Fit with recipe='best', or keep the whole run with model.save(path)."
        raise InvalidSettings(given, "one whose scores follow from histories by rows of items", remedy)
    if place.exists() and any(place.iterdir()):
        raise InvalidSettings(f"{place}, which holds something", "a new folder", "Name another, or empty it.")
    device = device_model(opened, Capacity.parse(capacity))
    metric, own, server = quality(opened, device)
    files.make_folder(place)
    size = write_device_model(opened, device, place / WEIGHTS, (metric, own, server))
    data, whole = model.data, model.numbers[1]
    names = [item_name(number, data).removeprefix("#") for number in range(data.num_items)]
    told = {
        "library_name": "fairfold", "model_type": KIND, "format": FORMAT, "fairfold": __version__,
        "capacity": str(device.capacity), "bytes": size, "metric": metric,
        "quality": own if own is not None and math.isfinite(own) else None,
        "pair_weight": algorithm.pair_weight, "users": data.num_users,
        "items": [int(name) for name in names] if whole else names, "titles": data.titles,
    }  # fmt: skip
    files.write_atomically(place / CONFIGURATION, json.dumps(told, ensure_ascii=False, indent=1).encode())
    files.write_atomically(place / CARD, card(model, told, title or place.name).encode())
    return place


def from_pretrained(folder: str | Path) -> Pretrained:
    """A model of one size from such a folder, or from a clone of the hub's; needs neither a run nor its data.

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
    with reading(place / CONFIGURATION, InvalidCheckpoint, "the configuration of a shared model", "Fetch it again."):
        told: dict[str, Any] = json.loads((place / CONFIGURATION).read_text(encoding="utf-8"))
        items, titles = list(told.pop("items")), told.pop("titles")
        kind, version, weight = told["model_type"], told["format"], float(told["pair_weight"])
    if (kind, version) != (KIND, FORMAT):
        raise InvalidCheckpoint(f"{place}: {kind}, format {version}", f"{KIND}, format {FORMAT}", "Update fairfold.")
    device, _ = read_device_model(place / WEIGHTS)
    known = device.projections.get(LISTED)
    if known is None or getattr(known, "items", 0) > len(items) or (titles is not None and len(titles) != len(items)):
        raise InvalidCheckpoint(f"{place}: {len(items)} items", "the names of the model's items", "Fetch it again.")
    return Pretrained(device, items, titles, told | {"pair_weight": weight})


def card(model: Model, told: dict[str, Any], title: str) -> str:
    """The model card: facts for the hub, then words, figures of every size, and lines that work."""
    result, first = model.result, told["items"][:3]
    value = "" if told["quality"] is None else f"{told['quality']:.4f}"
    measured = [
        "model-index:", f"- name: {json.dumps(title)}", "  results:",
        "  - task: {type: recommendation, name: Recommendation}",
        f"    dataset: {{type: {json.dumps(model.data.name)}, name: {json.dumps(model.data.name)}}}",
        "    metrics:", f"    - {{type: ndcg, name: {json.dumps(told['metric'])}, value: {value}}}",
    ]  # fmt: skip
    rows = "\n".join(
        f"| {row['devices']} | {human_bytes(row['bytes_held'])} | {row[result.metric]:.4f} |"
        for row in as_rows(result, "sizes")
        if math.isfinite(row[result.metric])
    )
    beside = "".join(f"\n| {name} | | {of:.4f} |" for name, of in result.references.items() if math.isfinite(of))
    words = "\n".join(f"- {line}" for line in [*result.told, *model.notes])
    return f"""---
library_name: fairfold
tags: [recommendation, federated-learning, collaborative-filtering, fairfold]
{chr(10).join(measured) if value else ""}
---

# {title}

A recommender of {len(told["items"]):,} items, trained by a federation of {told["users"]:,} users with fairfold
{told["fairfold"]} ([FAIR: Federated Averaging in Random Subspaces](https://arxiv.org/abs/2311.01722)). This is the
model of a {told["capacity"]} device, {human_bytes(told["bytes"])}. It holds what was learned about items, and no user's
data; what sums over users can tell of them is said in fairfold's docs/privacy.md.

```python
import fairfold

model = fairfold.from_pretrained(".")  # this folder
items, scores = model.recommend({first!r}, k=10)  # for somebody who has these items
```

| devices | memory | {told["metric"]}, all users |
|---|---|---|
{rows}{beside}

How the run went:

{words or "- Nothing to tell."}

`{WEIGHTS}` has the bytes of the device and in its header the settings of the run, `{CONFIGURATION}` the names of the
items in the model's order.
"""
