"""A trained model for use: `mdc.load(path)`, then encode, score, caption and fill.

Letters: B images, K captions of each, C channels, H W image size, P patches, D width, L tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdc.config import CONTRASTIVE, choose
from mdc.data.pictures import ImageLike, Images, as_bytes, as_list, as_pixels
from mdc.data.transforms import eval_images
from mdc.errors import UserError
from mdc.foreign import Foreign, load_foreign
from mdc.generate import Generated, generate
from mdc.generate.samplers import Length
from mdc.objectives.scoring import SCORERS, Scores, Seeds, default_scorer, score
from mdc.train.checkpoint import LoadedModel, load_model, untrained_model

LENGTH = 15  # tokens of a caption where none is given, or the model's longest
BATCH = 64  # images in one pass of the encoder
POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {  # [B, P, D] -> [B, D], or as it is
    "mean": lambda patches_BPD: patches_BPD.mean(1),
    "max": lambda patches_BPD: patches_BPD.amax(1),
    "none": lambda patches_BPD: patches_BPD,
}


def load(path: str | PathLike[str], device: str | torch.device | None = None) -> "Captioner | Foreign":
    """Open a checkpoint folder, or a model in MLflow by its URI, such as `runs:/<run id>/model`.

    Models of others are opened as encoders to compare with: `timm:NAME@WEIGHTS`, `open_clip:NAME@WEIGHTS`, or a folder
    that these libraries wrote. device: None takes a GPU where there is one. Raises UserError where there is no such
    model.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    foreign = load_foreign(str(path), torch.device(device))
    if foreign is not None:
        return foreign
    return Captioner(loaded_model(path, device), torch.device(device))


def loaded_model(path: str | PathLike[str], device: str | torch.device = "cpu") -> LoadedModel:
    """The parts of a model of ours: network, configuration, tokenizer and fingerprint."""
    return load_model(_folder(str(path)), device)


def _folder(path: str) -> Path:
    if path.startswith(("runs:/", "models:/", "mlflow-artifacts:/")) or "://" in path:
        from mdc.train.tracking import fetch_model  # MLflow is slow to import and seldom needed

        return fetch_model(path)
    return Path(path)


class Captioner:
    """A trained model with its tokenizer.

    Wherever images are asked for: PIL images, paths, or a tensor `[B, 3, H, W]`, uint8 or float in [0, 1]; one or many.
    Their centre square is resized to the model's size.
    """

    def __init__(self, loaded: LoadedModel, device: torch.device) -> None:
        self.loaded = loaded
        self.model, self.config, self.tokenizer = loaded.model, loaded.config, loaded.tokenizer
        self.fingerprint, self.device = loaded.fingerprint, device
        objective = loaded.config.pretrain.objective
        best = default_scorer(objective)
        self.scorers = sorted((n for n, s in SCORERS.items() if objective in s.objectives), key=lambda n: n != best)
        self._pools = objective in CONTRASTIVE  # its scorer reads the mean patch alone

    def encode(self, images: Images, pooling: str = "mean", layer: int | None = None) -> Tensor:
        """Features of pictures, `[B, D]` float32 on the CPU: those used for probes are the mean of the patches.

        pooling: mean, max, or none for the patches, `[B, P, D]`. layer: None is the encoder's output; a number is a
        block of it, from 0 or, from its end, -1, behind the final norm.
        """
        pool = choose("pooling", pooling, POOLINGS)
        rows = [pool(self._encoded(part, layer)).float().cpu() for part in self._batches(images)]
        return torch.cat(rows) if rows else torch.empty(0, self._width)

    def untrained(self, seed: int = 0) -> "Captioner":
        """The same architecture with random weights: the floor that training must beat."""
        model = untrained_model(self.config, seed).to(self.device)
        return Captioner(
            replace(self.loaded, model=model, fingerprint=f"{self.fingerprint}-untrained-{seed}"), self.device
        )

    def see(self, images: Images) -> Tensor:
        """What the scorers read of pictures, `[B, P, D]` on the model's device: patch features, or their mean alone."""
        parts = [self._encoded(part) for part in self._batches(images)]
        if self._pools:
            parts = [part.mean(1, keepdim=True) for part in parts]
        patches = 1 if self._pools else self.model.encoder.patches  # type: ignore[union-attr]
        return torch.cat(parts) if parts else torch.empty(0, patches, self._width, device=self.device)  # type: ignore[arg-type]

    def too_long(self, captions: Sequence[str]) -> list[bool]:
        """Which captions have more tokens than the model takes."""
        return [len(row) > self.config.max_tokens for row in self.tokenizer.encode(captions)]

    def score_seen(
        self, seen_MPD: Tensor, captions: Sequence[Sequence[str]], scorer: str, seeds: Seeds, draws: int
    ) -> Scores:
        """K captions for each of M pictures, or one row of K captions for all of them, scored `[M, K]`.

        seen_MPD: from `see`. seeds: one for all pictures or one each, and draws: of the scorer `mc`.
        """
        tokens_BL = self._padded([text for row in captions for text in row])
        tokens_MKL = tokens_BL.view(len(captions), len(captions[0]), -1)
        return score(self.model, self.config, seen_MPD, tokens_MKL, scorer, seeds, draws)

    def score(
        self,
        images: Images,
        captions: str | Sequence[str] | Sequence[Sequence[str]],
        scorer: str | None = None,
        draws: int = 32,
        seed: int = 0,
    ) -> Tensor:
        """How well captions fit images; larger is better.

        captions: one per image gives `[B]`, and so does a string for one image; a list of K per image gives `[B, K]`.
        All captions see the same random numbers, so that they can be compared. scorer: mc, heuristic or unmask for
        models that read masked captions, autoregressive, or cosine; None takes the one that fits the model's objective
        best.
        """
        if isinstance(captions, str):
            captions = [captions]
        rows = [[row] if isinstance(row, str) else list(row) for row in captions]
        single = any(isinstance(row, str) for row in captions)
        if len({len(row) for row in rows}) > 1:
            raise UserError("give every image equally many captions")
        seen_BPD = self.see(images)
        if len(rows) != len(seen_BPD):
            raise UserError(f"{len(rows)} captions or lists of captions for {len(seen_BPD)} images; give one each")
        if not rows:
            return torch.empty(0)
        value_BK = self.score_seen(seen_BPD, rows, scorer or self.scorers[0], seed, draws).value_MK
        return value_BK[:, 0] if single else value_BK

    def caption(
        self, images: Images, length: Length | None = None, steps: int | None = None, seed: int = 0, **options: Any
    ) -> list[str]:
        """Write a caption for each image.

        length: in tokens, the end token included, or `auto`; None is 15 or the model's longest. steps: of unmasking;
        None is one token a step. options: those of `mdc.generate.generate`, such as sampler, temperature, top_p, beams.
        """
        length = min(LENGTH, self.config.max_tokens) if length is None else length
        made = generate(self.model, self.config, self.see(images), length, steps=steps, seed=seed, **options)
        return self._texts(made)

    def fill(self, image: ImageLike | Tensor, template: str, seed: int = 0, **options: Any) -> str:
        """The template with each `[MASK]` replaced by one token that suits the image, as `a [MASK] dog`."""
        if "[MASK]" not in template:
            raise UserError(f"template {template!r} has no [MASK] to fill; write one where a word is missing")
        ids = self.tokenizer.encode_template(template)
        made = generate(self.model, self.config, self.see(image), template=ids, seed=seed, **options)
        return self._texts(made)[0]

    @property
    def _width(self) -> int:
        width = self.model.encoder.width  # type: ignore[union-attr]
        assert isinstance(width, int)
        return width

    def _texts(self, made: Generated) -> list[str]:
        return [self.tokenizer.decode(row) for row in made.tokens_ML.tolist()]

    def _padded(self, captions: Sequence[str]) -> Tensor:
        rows = self.tokenizer.encode(captions)
        for caption, row in zip(captions, rows, strict=True):
            if len(row) > self.config.max_tokens:
                raise UserError(
                    f"caption {caption!r} has {len(row)} tokens, the model takes {self.config.max_tokens}; shorten it"
                )
        width, pad_id = max(map(len, rows)), self.config.vocabulary.pad_id
        return torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])

    def _batches(self, images: Images) -> Iterator[Tensor]:
        """Normalised images, a batch at a time."""
        listed, size = as_list(images), self.config.pretrain.image_size
        for start in range(0, len(listed), BATCH):
            part = listed[start : start + BATCH]
            if isinstance(part, Tensor):
                yield eval_images(as_bytes(part), size).to(self.device)
            else:
                yield torch.cat([eval_images(as_pixels(image)[None], size) for image in part]).to(self.device)

    @torch.no_grad()
    def _encoded(self, images_BCHW: Tensor, layer: int | None = None) -> Tensor:
        return self.model.encode(images_BCHW, layer)  # type: ignore[operator]
