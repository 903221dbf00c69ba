"""Models by name as encoders to probe, beside their floors."""

from collections.abc import Sequence
from functools import partial

import torch

from mdc.api import Captioner, load
from mdc.eval.commands import Encoder, floor_of_pixels


def encoders_of(
    models: Sequence[str], poolings: Sequence[str], layer: int | None, floors: bool, device: torch.device, seed: int
) -> list[Encoder]:
    """Models by name as encoders to probe, with their floors: raw pixels, and each of our encoders untrained."""
    encoders: list[Encoder] = []
    for name in models:
        model = load(name, device)
        if isinstance(model, Captioner):
            encoders.append(_encoder(name, model, poolings, layer))
            if floors:
                encoders.append(_encoder(f"{name}, untrained", model.untrained(seed), poolings, layer))
        else:
            encoders.append(Encoder(name, {"": (model.encode, model.fingerprint)}))
    return [*encoders, floor_of_pixels()] if floors else encoders


def _encoder(name: str, model: Captioner, poolings: Sequence[str], layer: int | None) -> Encoder:
    ways = {
        pooling: (partial(model.encode, pooling=pooling, layer=layer), f"{model.fingerprint} {pooling} {layer}")
        for pooling in poolings
    }
    patches = partial(model.encode, pooling="none", layer=layer), f"{model.fingerprint} patches {layer}"
    return Encoder(name, ways, patches)
