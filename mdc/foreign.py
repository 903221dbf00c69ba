"""Encoders of timm and open_clip, so that they are measured by the same protocol as ours.

`timm:NAME@FILE`         a timm model with the weights of a file
`timm:NAME`              with timm's own weights, which timm keeps in a cache and may fetch
`open_clip:NAME@FILE`    an open_clip model with the weights of a file; also scores captions, by cosine
`open_clip:NAME@TAG`     with open_clip's own weights, which open_clip keeps in a cache and may fetch
a folder                 with the `config.json` of timm, or the `open_clip_config.json` of open_clip, and weights

Each uses its own size and normalisation of pictures.

Letters: B pictures, K captions of each, P patches, D width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from mdc.data.pictures import Images, as_bytes, as_list, as_rgb
from mdc.errors import UserError
from mdc.files import fingerprint, read_json, sha256
from mdc.objectives.scoring import Scores, Seeds

BATCH = 64  # pictures or captions in one pass
TIMM, OPEN_CLIP = "timm:", "open_clip:"
CONFIG = "config.json"
OPEN_CLIP_CONFIG = "open_clip_config.json"

Transform = Callable[[Image.Image], Tensor]


class Foreign(ABC):
    """A frozen encoder with the transform that it was trained with. fingerprint: of its weights and name."""

    scorers: Sequence[str] = ()

    def __init__(self, model: nn.Module, transform: Transform, mark: str, device: torch.device) -> None:
        self.model = model.to(device).eval().requires_grad_(False)
        self.transform, self.fingerprint, self.device = transform, mark, device

    def _batches(self, images: Images) -> Iterator[Tensor]:
        listed = as_list(images)
        if isinstance(listed, Tensor):
            pixels = as_bytes(listed).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
            listed = [Image.fromarray(array) for array in pixels]
        for start in range(0, len(listed), BATCH):
            part = [self.transform(as_rgb(image)) for image in listed[start : start + BATCH]]
            yield torch.stack(part).to(self.device)

    @abstractmethod
    def _features(self, images_BCHW: Tensor) -> Tensor:
        """`[B, D]` of transformed pictures."""

    @torch.no_grad()
    def encode(self, images: Images) -> Tensor:
        """The model's own features of pictures, `[B, D]` float32 on the CPU."""
        return torch.cat([self._features(part).float().cpu() for part in self._batches(images)])


class TimmEncoder(Foreign):
    """What the timm model gives without its classifier: the class token, or the mean of the patches."""

    def _features(self, images_BCHW: Tensor) -> Tensor:
        return self.model(images_BCHW)


class OpenClipEncoder(Foreign):
    """Features in the space that the model shares with text; captions are scored by cosine."""

    scorers = ("cosine",)

    def __init__(
        self,
        model: nn.Module,
        transform: Transform,
        mark: str,
        device: torch.device,
        tokenizer: Callable[[list[str]], Tensor],
    ) -> None:
        super().__init__(model, transform, mark, device)
        self.tokenizer = tokenizer

    def _features(self, images_BCHW: Tensor) -> Tensor:
        return self.model.encode_image(images_BCHW)  # type: ignore[operator]

    def see(self, images: Images) -> Tensor:
        """Features of length 1, `[B, 1, D]` on the model's device."""
        return F.normalize(self.encode(images), dim=-1)[:, None].to(self.device)

    def too_long(self, captions: Sequence[str]) -> list[bool]:
        """None: open_clip cuts captions at its context length, in its own evaluation as well."""
        return [False] * len(captions)

    @torch.no_grad()
    def text_features(self, captions: Sequence[str]) -> Tensor:
        """Features of length 1, `[K, D]` on the model's device."""
        parts = [
            self.model.encode_text(self.tokenizer(list(captions[i : i + BATCH])).to(self.device))  # type: ignore[operator]
            for i in range(0, len(captions), BATCH)
        ]
        return F.normalize(torch.cat(parts).float(), dim=-1)

    def score_seen(
        self, seen_MPD: Tensor, captions: Sequence[Sequence[str]], scorer: str, seeds: Seeds, draws: int
    ) -> Scores:
        """Cosines `[M, K]`, see `mdc.eval.scored.Subject`."""
        if scorer not in self.scorers:
            raise UserError(f"scorer {scorer!r} does not fit a model of open_clip; take cosine")
        image_MD = F.normalize(seen_MPD.mean(1), dim=-1)
        text_MKD = self.text_features([text for row in captions for text in row]).view(
            len(captions), -1, len(image_MD[0])
        )
        value_MK = torch.einsum("md,mkd->mk", image_MD, text_MKD.expand(len(image_MD), -1, -1)).cpu()
        return Scores(value_MK, torch.zeros_like(value_MK))


def load_foreign(path: str, device: torch.device) -> Foreign | None:
    """The model of another library that `path` names; None if it names none.

    Raises UserError if it cannot be opened.
    """
    folder = Path(path)
    for prefix, load in ((TIMM, _timm), (OPEN_CLIP, _open_clip)):
        if path.startswith(prefix):
            name, _, weights = path.removeprefix(prefix).partition("@")
            content = sha256(Path(weights)) if Path(weights).is_file() else weights
            return load(name, weights, fingerprint([prefix, name, content]), device)
    if (folder / OPEN_CLIP_CONFIG).is_file():
        return _open_clip(f"local-dir:{folder}", "", _of_folder(folder), device)
    if (folder / CONFIG).is_file() and "architecture" in read_json(folder / CONFIG):
        return _timm(f"local-dir:{folder}", "", _of_folder(folder), device)
    return None


def _of_folder(folder: Path) -> str:
    """A mark of the name and content of every file."""
    return fingerprint({file.name: sha256(file) for file in sorted(folder.iterdir()) if file.is_file()})


def _timm(name: str, weights: str, mark: str, device: torch.device) -> TimmEncoder:
    import timm
    from timm.data import create_transform, resolve_model_data_config

    options: dict[str, Any] = {"pretrained_cfg_overlay": {"file": weights}} if weights else {}
    try:
        model = timm.create_model(name, pretrained=True, num_classes=0, **options)
    except (RuntimeError, OSError, KeyError) as error:
        raise UserError(
            f"timm model {name!r} could not be opened: {error}; name one of timm.list_models() with a file of its "
            f"weights, as {TIMM}NAME@FILE"
        ) from error
    return TimmEncoder(model, create_transform(**resolve_model_data_config(model)), mark, device)


def _open_clip(name: str, weights: str, mark: str, device: torch.device) -> OpenClipEncoder:
    try:
        import open_clip
    except ImportError:
        raise UserError(f"{OPEN_CLIP}{name} needs the package open-clip-torch; install it with pip") from None

    if not weights and not name.startswith("local-dir:"):
        raise UserError(
            f"{OPEN_CLIP}{name} has no weights; give {OPEN_CLIP}NAME@FILE, or a folder that open_clip wrote"
        )
    try:
        model, _, transform = open_clip.create_model_and_transforms(name, pretrained=weights or None)
        tokenizer = open_clip.get_tokenizer(name)
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        raise UserError(
            f"open_clip model {name!r} could not be opened: {error}; name one of open_clip.list_models() with a file "
            f"of its weights, as {OPEN_CLIP}NAME@FILE"
        ) from error
    return OpenClipEncoder(model, transform, mark, device, tokenizer)
