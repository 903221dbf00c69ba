"""The objectives by name. What one is: `mdc.objectives.base.Objective`."""

from mdc.objectives.base import Objective, TextImage
from mdc.objectives.captioning import (
    Captioning,
    autoregressive_corruption,
    bert_corruption,
    cappa_corruption,
    cmlm_corruption,
    mdc_corruption,
)
from mdc.objectives.contrastive import Contrastive, clip_loss, siglip_loss

OBJECTIVES: dict[str, Objective] = {
    "mdc": Captioning(mdc_corruption, per="token"),
    "cmlm": Captioning(cmlm_corruption, per="target"),
    "bert": Captioning(bert_corruption, per="target"),
    "autoregressive": Captioning(autoregressive_corruption, per="token"),
    "cappa": Captioning(cappa_corruption, per="token"),
    "clip": Contrastive(clip_loss, scale=1 / 0.07, capped=True),
    "siglip": Contrastive(siglip_loss, scale=10.0, bias=-10.0),
}

__all__ = ["OBJECTIVES", "Objective", "TextImage"]
