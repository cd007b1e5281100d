"""Choose the device and the backend of a run from its settings."""

import torch

from fairfold.algorithms.gradient import GradientAlgorithm
from fairfold.backends.batched import batched, supports_batched_training
from fairfold.backends.cuda_graph import GraphBackend
from fairfold.backends.image_graph import ImageGraphBackend
from fairfold.errors import InvalidSettings
from fairfold.federation.clients import Clients, ImageClients
from fairfold.federation.plan import Plan
from fairfold.federation.round import Backend, sequential
from fairfold.federation.scheduling import ClientSampler
from fairfold.kernels import gpu


def supports_gpu(plan: Plan) -> bool:
    """Whether rounds of this plan can run on a GPU."""
    algorithm = plan.algorithm
    batched_steps = supports_batched_training(plan) and isinstance(algorithm, GradientAlgorithm) and not algorithm.prox
    synchronous = plan.settings.fleet.asynchronous.is_synchronous  # else updates of a round start from different models
    return batched_steps and synchronous and plan.settings.run.backend == "batched"


def choose_device(plan: Plan) -> torch.device:
    """The torch device that a run trains on: ``run.device``, where ``"auto"`` takes a GPU that can be used."""
    supported, wanted = supports_gpu(plan), plan.settings.run.device
    if wanted == "cuda" and not supported:
        needed = "a built-in model, run.backend='batched', gradient steps, prox=0, no fleet.asynchronous"
        remedy = "Use run.device='auto', which takes a GPU where it can be used."
        raise InvalidSettings("run.device='cuda' with settings that run on the CPU only", needed, remedy)
    if wanted == "cuda" and not gpu.available():
        given = "run.device='cuda' where torch has no GPU, or Triton is missing"
        raise InvalidSettings(given, "an NVIDIA GPU and Triton", "See fairfold doctor, or use run.device='cpu'.")
    return torch.device("cuda" if supported and wanted != "cpu" and gpu.available() else "cpu")


def choose_backend(sampler: ClientSampler, clients: Clients, device: torch.device) -> Backend:
    """The backend that computes the client updates of a run: ``run.backend``, on this device."""
    if sampler.plan.settings.run.backend == "sequential":
        return sequential
    if device.type != "cuda":
        return batched
    if isinstance(clients, ImageClients):
        return ImageGraphBackend(sampler, clients, device)
    return GraphBackend(sampler, clients, device)
