"""timm and open_clip models behind `mdc.load`, against the same models in their own libraries."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch.nn import functional as F

import mdc
from mdc.errors import UserError
from mdc.eval.retrieval import retrieval, score_matrix, zero_shot, zero_shot_texts

CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 20, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
CAPTIONS = ["a red square", "two dogs", "a very long caption " * 10]


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 50, 40, 3), dtype=np.uint8)
    return [Image.fromarray(each) for each in pixels]


@pytest.fixture(scope="module")
def timm_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("timm") / "weights.safetensors"
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit").state_dict(), path)
    return path


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    model = open_clip.CLIP(**CLIP)
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": CLIP, "preprocess_cfg": {"size": 32}}))
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    return folder


def test_a_timm_model_encodes_as_in_timm(timm_file: Path, pictures: list[Image.Image], tmp_path: Path) -> None:
    model = mdc.load(f"timm:test_vit@{timm_file}", "cpu")
    theirs = timm.create_model("test_vit", checkpoint_path=str(timm_file)).eval()
    theirs.reset_classifier(0)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs))
    with torch.no_grad():
        expected_BD = theirs(torch.stack([transform(picture) for picture in pictures]))
    torch.testing.assert_close(model.encode(pictures), expected_BD)
    pictures[1].save(tmp_path / "a.png")
    torch.testing.assert_close(model.encode(tmp_path / "a.png"), expected_BD[1:2])
    assert list(model.scorers) == []
    other = save_other(tmp_path / "other.safetensors")
    assert mdc.load(f"timm:test_vit@{other}", "cpu").fingerprint != model.fingerprint


def save_other(path: Path) -> Path:
    torch.manual_seed(1)
    save_file(timm.create_model("test_vit").state_dict(), path)
    return path


def test_an_open_clip_model_encodes_and_scores_as_in_open_clip(clip_folder: Path, pictures: list[Image.Image]) -> None:
    model: Any = mdc.load(clip_folder, "cpu")
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{clip_folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{clip_folder}")
    theirs.eval()
    with torch.no_grad():
        image_BD = theirs.encode_image(torch.stack([transform(picture) for picture in pictures]))
        text_KD = F.normalize(theirs.encode_text(tokenizer(CAPTIONS)), dim=-1)
    torch.testing.assert_close(model.encode(pictures), image_BD)
    cosine_BK = F.normalize(image_BD, dim=-1) @ text_KD.T
    seen = model.see(pictures)
    torch.testing.assert_close(model.score_seen(seen, [CAPTIONS], "cosine", 0, 2).value_MK, cosine_BK)
    own = [[text] for text in CAPTIONS]
    torch.testing.assert_close(model.score_seen(seen, own, "cosine", [0, 1, 2], 2).value_MK[:, 0], cosine_BK.diag())
    with pytest.raises(UserError, match="'mc' does not fit"):
        model.score_seen(seen, own, "mc", 0, 2)


def test_an_open_clip_file_and_name(tmp_path: Path, pictures: list[Image.Image]) -> None:
    torch.manual_seed(0)
    name = "ViT-S-32-alt"
    theirs, _, transform = open_clip.create_model_and_transforms(name)
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    model = mdc.load(f"open_clip:{name}@{tmp_path / 'weights.pt'}", "cpu")
    with torch.no_grad():
        expected_BD = theirs.eval().encode_image(torch.stack([transform(picture) for picture in pictures]))
    torch.testing.assert_close(model.encode(pictures), expected_BD)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("timm:no_such_vit@{file}", "timm model 'no_such_vit' could not be opened"),
        ("timm:vit_tiny_patch16_224@{file}", "could not be opened"),
        ("open_clip:ViT-B-32", "has no weights; give open_clip:NAME@FILE"),
        ("open_clip:ViT-B-32@/no/such/file", "could not be opened"),
    ],
)
def test_what_cannot_be_opened_is_told(timm_file: Path, path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mdc.load(path.format(file=timm_file))


def test_open_clips_own_evaluation_agrees(clip_folder: Path) -> None:
    """Retrieval by its training's metrics, and zero-shot classes by its classifier, on the same pictures."""
    from open_clip_train.train import get_clip_metrics

    model: Any = mdc.load(clip_folder, "cpu")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{clip_folder}")
    random = np.random.default_rng(1)
    pictures = [Image.fromarray(each) for each in random.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)]
    image_BD = model.see(pictures)[:, 0]

    texts = [f"caption number {number}" for number in range(40)]
    scored = score_matrix(model, pictures, model.see, texts, "cosine", 2, 0)
    ours = retrieval(scored, np.eye(40, dtype=bool))
    theirs = get_clip_metrics(image_BD, model.text_features(texts), torch.tensor(1.0))
    for k in (1, 5, 10):
        assert ours["picture_to_text"]["score"][f"recall_at_{k}"] == pytest.approx(theirs[f"image_to_text_R@{k}"])
        assert ours["text_to_picture"]["score"][f"recall_at_{k}"] == pytest.approx(theirs[f"text_to_image_R@{k}"])

    classes, labels = ["dog", "cat", "fox", "cow", "hen", "pig"], random.integers(6, size=40)
    scored = score_matrix(model, pictures, model.see, zero_shot_texts(classes, ["a photo of a {}"]), "cosine", 2, 0)
    told = zero_shot(scored, labels, templates=1)["score"]
    classifier_DC = open_clip.build_zero_shot_classifier(model.model, tokenizer, classes, ["a photo of a {}"])
    ranked_B5 = (image_BD @ classifier_DC).topk(5).indices == torch.from_numpy(labels)[:, None]
    assert told["top_1"] == pytest.approx(float(ranked_B5[:, 0].float().mean()))
    assert told["top_5"] == pytest.approx(float(ranked_B5.any(1).float().mean()))
