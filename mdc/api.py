"""A trained model for use: `mdc.load(path)`, then encode, score, caption and fill.

Letters: B images, K captions of each, C channels, H W image size, P patches, D width, L tokens.
"""

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mdc.data.images import Rejected, decode, to_rgb
from mdc.data.transforms import eval_images
from mdc.errors import UserError
from mdc.generate import Generated, generate
from mdc.generate.samplers import Length
from mdc.objectives.scoring import score
from mdc.train.checkpoint import LoadedModel, load_model

WHITE = (255, 255, 255)  # under transparent pixels
MAX_PIXELS = 100_000_000
LENGTH = 15  # tokens of a caption where none is given, or the model's longest
BATCH = 64  # images in one pass of the encoder

ImageLike = Image.Image | str | PathLike[str]
Images = ImageLike | Sequence[ImageLike] | Tensor


def load(path: str | PathLike[str], device: str | torch.device | None = None) -> "Captioner":
    """Open a checkpoint folder, or a model in MLflow by its URI, such as `runs:/<run id>/model`.

    device: None takes a GPU where there is one. Raises UserError where there is no such model.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Captioner(load_model(_folder(str(path)), device), torch.device(device))


def _folder(path: str) -> Path:
    if path.startswith(("runs:/", "models:/", "mlflow-artifacts:/")) or "://" in path:
        from mdc.train.tracking import fetch_model  # MLflow is slow to import and seldom needed

        return fetch_model(path)
    return Path(path)


def _as_list(images: Images) -> list[ImageLike] | Tensor:
    if isinstance(images, Tensor):
        return images[None] if images.ndim == 3 else images
    return [images] if isinstance(images, Image.Image | str | PathLike) else list(images)


def _pixels(image: ImageLike) -> Tensor:
    """uint8 `[3, H, W]`, upright, transparent parts on white."""
    try:
        if isinstance(image, Image.Image):
            rgb = to_rgb(image, WHITE)
        else:
            rgb, _ = decode(Path(image).read_bytes(), WHITE, MAX_PIXELS, max_aspect_ratio=float("inf"))
    except OSError as error:
        raise UserError(f"picture {image} could not be opened: {error.strerror}") from None
    except Rejected as error:
        raise UserError(f"{image} is not a picture that can be read: {error}") from None
    return torch.from_numpy(np.asarray(rgb).copy()).permute(2, 0, 1)


class Captioner:
    """A trained model with its tokenizer.

    Wherever images are asked for: PIL images, paths, or a tensor `[B, 3, H, W]`, uint8 or float in [0, 1]; one or many.
    Their centre square is resized to the model's size.
    """

    def __init__(self, loaded: LoadedModel, device: torch.device) -> None:
        self.model, self.config, self.tokenizer = loaded.model, loaded.config, loaded.tokenizer
        self.fingerprint, self.device = loaded.fingerprint, device

    def encode(self, images: Images) -> Tensor:
        """The features used for probes, `[B, D]` float32 on the CPU: the mean of the patch features."""
        means = [self._encoded(part).mean(1).float().cpu() for part in self._batches(images)]
        return torch.cat(means) if means else torch.empty(0, self._width)

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
        patches_BPD = self._patches(images)
        if len(rows) != len(patches_BPD):
            raise UserError(f"{len(rows)} captions or lists of captions for {len(patches_BPD)} images; give one each")
        if not rows:
            return torch.empty(0)
        tokens_BKL = self._padded([text for row in rows for text in row]).view(len(rows), len(rows[0]), -1)
        value_BK = score(self.model, self.config, patches_BPD, tokens_BKL, scorer, seed, draws).value_MK
        return value_BK[:, 0] if single else value_BK

    def caption(
        self, images: Images, length: Length | None = None, steps: int | None = None, seed: int = 0, **options: Any
    ) -> list[str]:
        """Write a caption for each image.

        length: in tokens, the end token included, or `auto`; None is 15 or the model's longest. steps: of unmasking;
        None is one token a step. options: those of `mdc.generate.generate`, such as sampler, temperature, top_p, beams.
        """
        length = min(LENGTH, self.config.max_tokens) if length is None else length
        made = generate(self.model, self.config, self._patches(images), length, steps=steps, seed=seed, **options)
        return self._texts(made)

    def fill(self, image: ImageLike | Tensor, template: str, seed: int = 0, **options: Any) -> str:
        """The template with each `[MASK]` replaced by one token that suits the image, as `a [MASK] dog`."""
        if "[MASK]" not in template:
            raise UserError(f"template {template!r} has no [MASK] to fill; write one where a word is missing")
        ids = self.tokenizer.encode_template(template)
        made = generate(self.model, self.config, self._patches(image), template=ids, seed=seed, **options)
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
        listed, size = _as_list(images), self.config.pretrain.image_size
        for start in range(0, len(listed), BATCH):
            part = listed[start : start + BATCH]
            if isinstance(part, Tensor):
                yield eval_images(self._bytes(part), size).to(self.device)
            else:
                yield torch.cat([eval_images(_pixels(image)[None], size) for image in part]).to(self.device)

    @staticmethod
    def _bytes(images_BCHW: Tensor) -> Tensor:
        """The tensor on the scale of bytes, 0 to 255."""
        if images_BCHW.ndim != 4 or images_BCHW.shape[1] != 3:
            raise UserError(f"images of shape {list(images_BCHW.shape)}; give [B, 3, H, W]")
        if not images_BCHW.is_floating_point():
            return images_BCHW
        low, high = images_BCHW.aminmax()
        if low < 0 or high > 1:
            raise UserError(
                f"float images lie in {float(low):.3g}..{float(high):.3g}; scale them to 0..1, or give uint8"
            )
        return images_BCHW * 255

    @torch.no_grad()
    def _encoded(self, images_BCHW: Tensor) -> Tensor:
        return self.model.encode(images_BCHW)  # type: ignore[operator]

    def _patches(self, images: Images) -> Tensor:
        parts = [self._encoded(part) for part in self._batches(images)]
        if not parts:
            return torch.empty(0, self.model.encoder.patches, self._width, device=self.device)  # type: ignore[union-attr,arg-type]
        return torch.cat(parts)
