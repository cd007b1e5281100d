"""SGD, Adagrad and Adam that touch only the slots training has touched, with the numbers of torch's dense optimisers.

A slot without a gradient so far has zero moments, so the dense optimiser leaves it where it is. These keep state for
the touched slots alone, in a sorted list that grows with the data, and give the dense optimiser's numbers at each step,
whatever the batches. Memory and time depend on the touched slots, not on the size of the vector. They take the sparse
gradients of ``FairEmbedding(..., sparse=True)``; parameters with ordinary gradients are trained as usual.

Weight decay would move every slot at every step and is therefore not offered.
"""

from collections.abc import Callable, Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fairfold.errors import InvalidSettings

State = dict[str, Any]


class _TouchedSlots(Optimizer):
    """The part all three share: finding the touched slots, their values and their state.

    A subclass names its state tensors with the value a fresh one has, and says how values move.
    """

    moves_all_touched = False
    """Whether a slot can move in a step that gives it no gradient (by its moments)."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        checked_rate(defaults["lr"])
        super().__init__(params, defaults)

    def _fresh(self, group: dict[str, Any]) -> dict[str, float]:
        """Names of the state tensors, with the value of a slot never touched before."""
        raise NotImplementedError

    def _move(self, values: Tensor, gradient: Tensor, state: State, group: dict[str, Any], step: int) -> None:
        """Update ``values`` and ``state`` in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step over all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    if parameter.grad.is_sparse:
                        gradient = parameter.grad.coalesce()
                        self._step_on_slots(parameter, gradient.indices()[0], gradient.values(), state, group)
                    else:
                        self._step_on_all(parameter, parameter.grad, state, group)
        return loss

    def _step_on_all(self, parameter: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        if "slots" in state:
            raise _two_kinds("a dense gradient after sparse ones")
        for name, value in self._fresh(group).items():
            if name not in state:
                state[name] = torch.full_like(parameter, value)
        self._move(parameter, gradient, state, group, state["step"])

    def _step_on_slots(
        self, parameter: Tensor, slots: Tensor, gradient: Tensor, state: State, group: dict[str, Any]
    ) -> None:
        fresh = self._fresh(group)
        if fresh and state["step"] > 1 and "slots" not in state:
            raise _two_kinds("a sparse gradient after dense ones")
        at = extend(state, slots, fresh, parameter) if fresh else None
        if at is not None and self.moves_all_touched:
            slots = state["slots"]
            gradient = parameter.new_zeros(len(slots)).index_copy_(0, at, gradient)
            at = None
        part = state if at is None else {name: state[name][at] for name in fresh}
        values = parameter[slots]
        self._move(values, gradient, part, group, state["step"])
        parameter[slots] = values
        if at is not None:
            for name in fresh:
                state[name][at] = part[name]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would turn slot numbers into floats: they are taken from the given state as they are."""
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, own, strict=True):
            slots = state_dict["state"].get(key, {}).get("slots")
            if slots is not None:
                self.state[parameter]["slots"] = slots.to(parameter.device, copy=True)


def checked_rate(rate: float) -> float:
    """The rate, if it is one."""
    if not rate >= 0:
        raise InvalidSettings(f"lr={rate}", "a rate of 0 or more", "Try 0.01.")
    return rate


def _two_kinds(found: str) -> InvalidSettings:
    return InvalidSettings(found, "one kind for a parameter", "Use a new optimiser, as a round does.")


def extend(state: State, slots: Tensor, fresh: dict[str, float], like: Tensor) -> Tensor:
    """Make room for ``slots`` (sorted, each once) in the state's sorted list; where they stand in it."""
    known = state.get("slots")
    if known is None:
        state["slots"] = slots.clone()
        for name, value in fresh.items():
            state[name] = torch.full((len(slots),), value, dtype=like.dtype, device=like.device)
        return torch.arange(len(slots), device=slots.device)
    at = torch.searchsorted(known, slots)
    absent = known[at.clamp(max=len(known) - 1)] != slots if len(known) else torch.ones_like(slots, dtype=torch.bool)
    new = slots[absent]
    if len(new) == 0:
        return at
    # Two sorted lists become one without sorting: each entry moves up by the entries of the other list before it.
    carried = torch.searchsorted(new, known)
    carried += torch.arange(len(known), device=known.device)
    merged = torch.empty(len(known) + len(new), dtype=known.dtype, device=known.device)
    merged[carried] = known
    merged[at[absent] + torch.arange(len(new), device=new.device)] = new
    for name, value in fresh.items():
        grown = torch.full((len(merged),), value, dtype=like.dtype, device=like.device)
        grown[carried] = state[name]
        state[name] = grown
    state["slots"] = merged
    return at + absent.cumsum(0) - absent.long()


class SGD(_TouchedSlots):
    """Stochastic gradient descent, with momentum if asked; the numbers of ``torch.optim.SGD``."""

    moves_all_touched = True  # with momentum; without, there is no state and only the batch's slots are visited

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def _fresh(self, group: dict[str, Any]) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if group["momentum"] else {}

    def _move(self, values: Tensor, gradient: Tensor, state: State, group: dict[str, Any], step: int) -> None:  # noqa: ARG002
        if group["momentum"]:
            gradient = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        values.add_(gradient, alpha=-group["lr"])


class Adagrad(_TouchedSlots):
    """Adagrad; the numbers of ``torch.optim.Adagrad``."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        super().__init__(params, {"lr": lr, "lr_decay": lr_decay, "initial": initial_accumulator_value, "eps": eps})

    def _fresh(self, group: dict[str, Any]) -> dict[str, float]:
        return {"sum": group["initial"]}

    def _move(self, values: Tensor, gradient: Tensor, state: State, group: dict[str, Any], step: int) -> None:
        rate = group["lr"] / (1 + (step - 1) * group["lr_decay"])
        deviation = state["sum"].addcmul_(gradient, gradient).sqrt().add_(group["eps"])
        values.addcdiv_(gradient, deviation, value=-rate)


class Adam(_TouchedSlots):
    """Adam; the numbers of ``torch.optim.Adam``, not of ``SparseAdam``, which forgets to let idle moments decay."""

    moves_all_touched = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def _fresh(self, group: dict[str, Any]) -> dict[str, float]:  # noqa: ARG002
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def _move(self, values: Tensor, gradient: Tensor, state: State, group: dict[str, Any], step: int) -> None:
        first, second = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        deviation = (state["exp_avg_sq"].sqrt() / sqrt(1 - second**step)).add_(group["eps"])
        values.addcdiv_(state["exp_avg"], deviation, value=-group["lr"] / (1 - first**step))
