import numpy as np
import pytest
import torch
from PIL import Image

import mdc
from mdc.api import Captioner
from mdc.config import ModelConfig
from mdc.data.tokenizer import CaptionTokenizer
from mdc.errors import UserError
from mdc.train.checkpoint import initial_model, save_model

CAPTIONS = ["a red dog", "a blue cat", "the green bird", "a dog and a cat"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, tiny_config):
    """`checkpoints(objective)`: the folder of a random model with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = CaptionTokenizer.train(CAPTIONS * 5, vocab_size=100, lowercase=True)
    tokenizer.save(folder / "tokenizer.json")

    def make(objective: str):
        path = folder / objective
        if not path.exists():
            pretrain = tiny_config(objective).pretrain
            config = ModelConfig(pretrain=pretrain, vocabulary=tokenizer.vocabulary, max_tokens=8)
            path.mkdir()
            save_model(path, initial_model(config, seed=0), config, folder / "tokenizer.json")
        return path

    return make


@pytest.fixture
def model(checkpoints) -> Captioner:
    return mdc.load(checkpoints("mdc"))


@pytest.fixture
def pictures(tmp_path) -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 20, 20, 3), dtype=np.uint8)
    return [Image.fromarray(p) for p in pixels]


def test_pictures_paths_and_tensors_are_the_same_images(model, pictures, tmp_path) -> None:
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for picture, path in zip(pictures, paths, strict=True):
        picture.save(path)
    bytes_BCHW = torch.stack([torch.from_numpy(np.asarray(p).copy()).permute(2, 0, 1) for p in pictures])
    features_BD = model.encode(pictures)
    assert features_BD.shape == (3, 16)
    assert features_BD.dtype == torch.float32
    for other in (paths, [str(path) for path in paths], bytes_BCHW, bytes_BCHW.float() / 255):
        torch.testing.assert_close(model.encode(other), features_BD, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.encode(pictures[1]), features_BD[1:2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.encode(bytes_BCHW[1]), features_BD[1:2], atol=1e-5, rtol=1e-5)
    assert model.encode([]).shape == (0, 16)


def test_transparent_pictures_are_seen_on_white(model) -> None:
    clear = Image.new("RGBA", (20, 20), (0, 255, 0, 0))
    torch.testing.assert_close(model.encode(clear), model.encode(Image.new("RGB", (20, 20), "white")))


@pytest.mark.parametrize("objective", ["mdc", "autoregressive", "siglip"])
def test_scores_of_pairs_and_of_lists(checkpoints, pictures, objective: str) -> None:
    model = mdc.load(checkpoints(objective))
    pairs_B = model.score(pictures, CAPTIONS[:3])
    assert pairs_B.shape == (3,)
    lists_BK = model.score(pictures, [[caption, "a cat"] for caption in CAPTIONS[:3]])
    assert lists_BK.shape == (3, 2)
    torch.testing.assert_close(lists_BK[:, 0], pairs_B, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(model.score(pictures[1], CAPTIONS[1:2]), pairs_B[1:2], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(model.score(pictures[1], CAPTIONS[1]), pairs_B[1:2], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("objective", ["mdc", "cappa"])
def test_captions_are_words_and_repeat_with_their_seed(checkpoints, pictures, objective: str) -> None:
    model = mdc.load(checkpoints(objective))
    texts = model.caption(pictures, temperature=1.0, seed=4)
    assert len(texts) == 3
    assert all(isinstance(text, str) for text in texts)
    assert not any("[" in text for text in texts)
    assert model.caption(pictures[2], temperature=1.0, seed=4) == texts[2:]
    assert len(model.caption(pictures, length=4)[0].split()) <= 3


def test_fill_keeps_the_words_of_the_template(model, pictures) -> None:
    text = model.fill(pictures[0], "a [MASK] dog")
    assert text.startswith("a")
    assert text.endswith("dog")
    assert "[MASK]" not in text


def test_special_names_in_a_caption_are_ordinary_text(model, pictures) -> None:
    assert model.score(pictures[:1], ["a [MASK]"]).isfinite().all()


def test_mistakes_are_named_with_their_fix(checkpoints, model, pictures, tmp_path) -> None:
    (tmp_path / "page.png").write_text("<html>404</html>")
    with pytest.raises(UserError, match=r"missing\.png could not be opened: No such file"):
        model.encode(tmp_path / "missing.png")
    with pytest.raises(UserError, match=r"page\.png is not a picture"):
        model.encode(tmp_path / "page.png")
    with pytest.raises(UserError, match=r"give \[B, 3, H, W\]"):
        model.encode(torch.zeros(1, 4, 20, 20))
    with pytest.raises(UserError, match=r"scale them to 0\.\.1"):
        model.encode(torch.full((1, 3, 20, 20), 200.0))
    with pytest.raises(UserError, match=r"2 captions .* for 3 images"):
        model.score(pictures, CAPTIONS[:2])
    with pytest.raises(UserError, match=r"has no \[MASK\] to fill"):
        model.fill(pictures[0], "a dog")
    with pytest.raises(UserError, match="has 13 tokens, the model takes 8"):
        model.score(pictures[:1], ["a " * 12])
    with pytest.raises(UserError, match="compares captions but writes none"):
        mdc.load(checkpoints("clip")).caption(pictures)
    with pytest.raises(UserError, match="is no checkpoint"):
        mdc.load(tmp_path)
