"""What an objective is: a few functions that the trainer and the evaluation call without knowing which one it is.

Letters: B batch, C channels, H W image size, L tokens.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mdc.config import ModelConfig
from mdc.draws import Draws


@dataclass(frozen=True)
class TextImage:
    """A batch. Captions may stay on the host: corruption happens there, and nothing waits for the device."""

    images_BCHW: Tensor  # float, normalised
    tokens_BL: Tensor  # int64, padded at the end with the vocabulary's pad_id


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, or itself."""
    inner = getattr(model, "module", model)
    assert isinstance(inner, nn.Module)
    return inner


def config_of(model: nn.Module) -> ModelConfig:
    config = unwrapped(model).config
    assert isinstance(config, ModelConfig)
    return config


class Objective(ABC):
    """One way to learn from pairs of image and caption."""

    @abstractmethod
    def build(self, config: ModelConfig) -> nn.Module:
        """The model, in training mode on the CPU, drawn from torch's global generator."""

    @abstractmethod
    def loss(self, model: nn.Module, inputs: TextImage, draws: Draws | torch.Generator) -> tuple[Tensor, Tensor]:
        """`(sum, count)`, unreduced scalars in float32 on the device of the images.

        The loss of an update is the sum over all ranks and micro-batches divided by the count over them. All
        parameters take part in one call of `model`, so that DDP and FSDP see them.
        """

    def constrain(self, model: nn.Module) -> None:  # noqa: B027  most models have no limits
        """Put parameters that have limits back within them; called after every update."""

    @abstractmethod
    def score(self, model: nn.Module, images_BCHW: Tensor, tokens_BL: Tensor, seed: int = 0) -> Tensor:
        """How well each caption fits its image, `[B]`, larger is better, by the objective's own scorer."""
