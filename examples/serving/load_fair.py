"""FAIR's compact tables that `fairfold export` wrote, in numpy: recover the items, and recommend (docs/export.md)."""

import json
import sys
from typing import Any

import numpy as np
from safetensors import safe_open

WORD, LONG = np.uint64(0xFFFFFFFF), 2**64 - 1
File = tuple[dict[str, Any], dict[str, Any]]


def load(path: str) -> File:
    with safe_open(path, "np") as file:
        metadata = {key: json.loads(file.metadata()[key]) for key in ("projections", "settings", "data")}
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


def mix(word: Any, inner_key: Any = 0) -> Any:
    word = ((word ^ (word >> 16)) * np.uint64(0x7FEB352D) + np.uint64(inner_key)) & WORD
    word = ((word ^ (word >> 15)) * np.uint64(0x846CA68B)) & WORD
    return word ^ (word >> 16)


def tensor(file: File, name: str) -> Any:
    compact, held = file[0][name], file[1]["projections"][name]
    head, chunk, key = held["head"], held["chunk"], (held["seed"] + 0x9E3779B97F4A7C15) & LONG
    if held["size"] < held["full_size"]:
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & LONG
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & LONG
        key, a = key ^ (key >> 31), np.arange(held["full_size"], dtype=np.uint64)
        block, offset = a // np.uint64(chunk), a % np.uint64(chunk)
        keys = mix((block >> 32) ^ (key & 0xFFFFFFFF)), mix(((block >> 32) + (key >> 32)) & WORD)
        hashed = mix((block & WORD) ^ keys[0], keys[1])
        slot = head + ((hashed * ((held["size"] - head) // chunk)) >> 32) * chunk + offset
        bits = mix((hashed + 0x9E3779B9 * (1 + (offset >> 5))) & WORD) >> (offset & 31)
        sign = np.where((a < head) | (not held["sign"]), 1, 1 - 2 * (bits & 1).astype(int))
        compact = (compact[np.where(a < head, a, slot).astype(int)] * sign).astype(compact.dtype)
    return compact.reshape(held["shape"])


def scores(file: File, history: list[int], user: dict[str, Any] | None = None) -> Any:
    algorithm, model = file[1]["settings"]["algorithm"], file[1]["settings"]["model"]
    if user is None:  # a vector solved for by algorithm.kind = "closed_form"
        items, w = tensor(file, "item.weight"), algorithm["unobserved_weight"]
        own, ridge = items[history], algorithm["ridge"] * np.eye(items.shape[1])
        return items @ np.linalg.solve((1 - w) * own.T @ own + w * items.T @ items + ridge, own.sum(0))
    if model["kind"] == "mf":  # vectors that a device trained, by their names
        return tensor(file, "item.weight") @ user["user.weight"]
    product, network = tensor(file, "item_product.weight"), tensor(file, "item_network.weight")
    pair = np.concatenate([np.broadcast_to(user["user_network.weight"], network.shape), network], 1)
    layer = pair @ tensor(file, "network.1.weight").T + tensor(file, "network.1.bias")
    both = np.concatenate([product * user["user_product.weight"], np.maximum(layer, 0)], 1)
    return both @ tensor(file, "output.weight")[0] + tensor(file, "output.bias")


if __name__ == "__main__":
    score = scores(load(sys.argv[1]), own := [int(item) for item in sys.argv[2].split(",")])
    print(*[(int(item), float(score[item])) for item in np.argsort(-score) if item not in own][:10], sep="\n")
