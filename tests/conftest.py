"""What several folders of tests need: tiny random models, quick to build and far from uniform."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., Any]:
    """`tiny_config(objective, words=3, max_tokens=6, **pretrain)`: a ModelConfig of a few thousand weights.

    Its special ids are pad 0, unk 1, bos 2, eos 3, mask 4; ordinary words start at 5. Images are 16 pixels wide.
    """
    from mdc.config import ModelConfig, PretrainParams, Vocabulary

    def make(objective: str = "mdc", words: int = 3, max_tokens: int = 6, **pretrain: Any) -> ModelConfig:
        fields = {
            "objective": objective,
            "image_size": 16,
            "encoder_options": {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2},
            "decoder_width": 16,
            "decoder_depth": 2,
            "decoder_heads": 2,
            "embed_dim": 8,
            **pretrain,
        }
        vocabulary = Vocabulary(size=5 + words, pad_id=0, unk_id=1, bos_id=2, eos_id=3, mask_id=4)
        return ModelConfig(pretrain=PretrainParams.model_validate(fields), vocabulary=vocabulary, max_tokens=max_tokens)

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_config: Callable[..., Any]) -> Callable[..., Any]:
    """`tiny_model(objective, seed=0, **options of tiny_config)`: a random model with large weights, to be evaluated."""
    import torch

    from mdc.objectives import OBJECTIVES

    def make(objective: str = "mdc", seed: int = 0, **options: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = OBJECTIVES[objective].build(tiny_config(objective, **options)).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(
                        torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1) + (parameter.ndim == 1)
                    )
        return model

    return make
