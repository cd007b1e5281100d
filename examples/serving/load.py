"""A model that `fairfold export` wrote, in numpy: load it, and recommend (docs/export.md has the format)."""

import json
import sys
from typing import Any

import numpy as np
from safetensors import safe_open


def load(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    with safe_open(path, "np") as file:
        metadata = {key: json.loads(file.metadata()[key]) for key in ("projections", "settings")}
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


def unpack(content: Any, count: int, bits: int) -> Any:
    digits = np.unpackbits(content, bitorder="little")[: count * bits].reshape(count, bits)
    return (digits.astype(np.int64) << np.arange(bits)).sum(1)


def pair_list(tensors: dict[str, Any], metadata: dict[str, Any], name: str, items: int) -> list[Any]:
    facts = metadata["projections"].get(name, {"kept": [0]})
    if not (n := facts["kept"][0]):
        return [np.empty(0, int), np.empty(0, int), np.empty(0)]
    content, square = tensors[name], facts["directed"]
    low = max(0, ((items * items if square else items * (items + 1) // 2) // n).bit_length() - 1)
    starts = np.cumsum([64, (n + 1) // 2, (n * low + 7) // 8])
    levels, codes, lows, bitmap = np.split(content, starts)
    high = np.flatnonzero(np.unpackbits(bitmap, bitorder="little")) - np.arange(n)
    position = (high << low) + unpack(lows, n, low)
    j = position // items if square else ((np.sqrt(8 * position + 1) - 1) // 2).astype(int)
    i = position - (j * items if square else j * (j + 1) // 2)
    return [j, i, levels.copy().view("<f4")[unpack(codes, n, 4)]]


def recommend(tensors: dict[str, Any], metadata: dict[str, Any], history: list[int], top: int = 10) -> list[Any]:
    rows, content = metadata["projections"]["rows"], tensors["rows"]
    (known, width), bits, items = rows["kept"], rows["bits"], rows["shape"][0]
    codes, w = np.zeros((items, 2)), np.zeros((items, width - 2))
    codes[:known] = content[: 2 * known].reshape(known, 2)
    a, b = np.where(codes > 0, np.exp((codes - 208) / 16), 0).T
    for row, numbers in enumerate(content[2 * known :].reshape(known, -1)):
        w[row] = unpack(numbers, width - 2, bits) - (2.0 ** (bits - 1) - 1)
    names = tensors.get("leading", np.arange(items))
    has = np.isin(names, history)
    score = np.where(np.arange(items) < known, b * (w @ ((has * a) @ w)), -np.inf)
    j, i, t = pair_list(tensors, metadata, "pairs", items)
    t = metadata["settings"]["algorithm"]["pair_weight"] * (j != i) * (t - b[j] * (w[j] * w[i]).sum(1) * a[i])
    back = np.where((j < known) & (i < known), a[j] * b[i] / np.maximum(a[i] * b[j], 1e-30), 1)
    added = np.bincount(j, has[i] * t, items) + np.bincount(i, has[j] * t * back, items)
    j, i, t = pair_list(tensors, metadata, "neighbors", items)
    added = added + np.bincount(j, (j != i) * has[i] * t, items)
    score = np.where((score == -np.inf) & (added != 0), added, score + added)
    curve = np.where(tensors["popularity"] > 0, (tensors["popularity"] - 208.0) / 16, -69)
    score += np.exp(np.interp(np.log2(np.arange(items) + 1), np.arange(len(curve)), curve)) / (1 + has[:known].sum())
    best = [item for item in np.argsort(-score, kind="stable") if not has[item]][:top]
    return [(int(names[item]), float(score[item])) for item in best]


if __name__ == "__main__":
    print(*recommend(*load(sys.argv[1]), [int(item) for item in sys.argv[2].split(",")]), sep="\n")
