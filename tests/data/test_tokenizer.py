"""No caption spells a special token, whatever the tokenizer, and equal captions train equal tokenizers."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mdc.data.tokenizer import CaptionTokenizer
from mdc.errors import UserError

CAPTIONS = [f"a {size} {colour} dog on the mat" for size in ("big", "small") for colour in ("red", "green", "blue")]
SPELLING = "a [MASK] dog [PAD] <|endoftext|> [EOS][BOS] </s> <s> <pad> [CLS] [mask]"
IDS = ("pad_id", "unk_id", "bos_id", "eos_id", "mask_id")


def byte_pairs(folder: Path) -> Path:
    """Like GPT-2's: one special token, which is begin, end and pad at once."""
    tokenizer = Tokenizer(
        models.BPE({"<|endoftext|>": 0, "a": 1, "d": 2, "o": 3, "g": 4, "do": 5, "dog": 6}, [("d", "o"), ("do", "g")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    end = "<|endoftext|>"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end).save_pretrained(
        folder
    )
    return folder


def bert(folder: Path) -> Path:
    """Like BERT's: pad id 0, and classes instead of begin and end."""
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog"])}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


def pieces(folder: Path) -> Path:
    """Like T5's: the special names are ordinary pieces of the vocabulary too."""
    names = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        *((c, -5.0) for c in "adog[]MSKPEBOCL<>|/sk "),
        ("dog", -1.0),
    ]
    tokenizer = Tokenizer(models.Unigram(names, unk_id=2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(params=[None, byte_pairs, bert, pieces], ids=["trained", "byte_pairs", "bert", "pieces"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> CaptionTokenizer:
    if request.param is None:
        return CaptionTokenizer.train(CAPTIONS, 100, lowercase=True)
    return CaptionTokenizer.load(request.param(tmp_path / "loaded"))


def test_text_never_yields_special_ids_before_and_after_saving(tokenizer: CaptionTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "saved" / "tokenizer.json")
    for each in (tokenizer, CaptionTokenizer.load(tmp_path / "saved")):
        assert each.vocabulary == tokenizer.vocabulary
        v = each.vocabulary
        assert len({v.pad_id, v.bos_id, v.eos_id, v.mask_id}) == 4
        assert all(0 <= getattr(v, name) < v.size for name in IDS)
        for text in (SPELLING, *SPELLING.split()):
            ids = each.encode([text])[0]
            assert ids[-1] == v.eos_id
            assert not {v.pad_id, v.bos_id, v.eos_id, v.mask_id} & set(ids[:-1])
            assert max(ids) < v.size
        assert each.spells_special(SPELLING)
        assert not each.spells_special("a dog")
        assert each.encode(["a dog", SPELLING]) == tokenizer.encode(["a dog", SPELLING])


def test_saving_again_gives_the_same_bytes(tokenizer: CaptionTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "one.json")
    CaptionTokenizer.load(tmp_path / "one.json").save(tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert Tokenizer.from_file(str(tmp_path / "one.json")).get_vocab_size() == tokenizer.vocabulary.size


def test_templates(tokenizer: CaptionTokenizer) -> None:
    mask = tokenizer.vocabulary.mask_id
    ids = tokenizer.encode_template("a [MASK] dog [MASK]")
    assert ids.count(mask) == 2
    assert ids[-1] == tokenizer.vocabulary.eos_id
    assert ids[-2] == mask
    assert [i for i in ids if i != mask] == tokenizer.encode(["a"])[0][:-1] + tokenizer.encode(["dog"])[0]


def test_existing_roles_are_kept_and_missing_ones_get_new_ids(tmp_path: Path) -> None:
    gpt = CaptionTokenizer.load(byte_pairs(tmp_path / "gpt")).vocabulary
    assert gpt.eos_id == 0
    assert sorted((gpt.pad_id, gpt.unk_id, gpt.bos_id, gpt.mask_id)) == [7, 8, 9, 10]
    assert gpt.size == 11
    like_bert = CaptionTokenizer.load(bert(tmp_path / "bert")).vocabulary
    assert [getattr(like_bert, name) for name in IDS] == [0, 1, 2, 3, 4]
    assert like_bert.size == 7


def test_round_trip_and_tokens() -> None:
    tokenizer = CaptionTokenizer.train(CAPTIONS, 200, lowercase=True)
    ids = tokenizer.encode(["A big RED dog on the mat"])[0]
    assert (
        tokenizer.decode([tokenizer.vocabulary.bos_id, *ids, tokenizer.vocabulary.pad_id]) == "a big red dog on the mat"
    )
    assert tokenizer.tokens(ids) == ["a", "big", "red", "dog", "on", "the", "mat", "[EOS]"]
    assert tokenizer.encode(["a [MASK]"]) == tokenizer.encode(["a [mask]"])  # read as text, not spelt letter by letter
    cased = CaptionTokenizer.train(["Dog", "dog"] * 9, 200, lowercase=False)
    assert cased.encode(["Dog"]) != cased.encode(["dog"])


SCRIPT = """
import sys
import socket
from pathlib import Path
from mdc.data.tokenizer import CaptionTokenizer
words = [f"{a}{b}{c} {c}{a}" for a in "abcdefgh" for b in "xyzuvw" for c in "klmnop"]
CaptionTokenizer.train(words, 120, True).save(Path(sys.argv[1]))
"""


def test_training_is_the_same_in_every_process(tmp_path: Path) -> None:
    """The library's own trainer numbers pieces in the random order of a hash map."""
    files = [tmp_path / f"{i}.json" for i in range(3)]
    for file in files:
        subprocess.run([sys.executable, "-c", SCRIPT, str(file)], check=True)
    assert len({file.read_bytes() for file in files}) == 1
    assert len(json.loads(files[0].read_text())["model"]["vocab"]) == 120


def test_many_letters_leave_room_for_words() -> None:
    captions = ["".join(chr(0x4E00 + i) for i in range(500)), *["dog house"] * 50]
    tokenizer = CaptionTokenizer.train(captions, 64, lowercase=True)
    assert tokenizer.vocabulary.size <= 64
    assert len(tokenizer.encode(["dog house"])[0]) == 3


@pytest.mark.parametrize("make", [lambda folder: folder / "none", lambda folder: folder])
def test_a_tokenizer_that_is_not_there(
    tmp_path: Path, make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"caption\.tokenizer: cannot load"):
        CaptionTokenizer.load(make(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer"):
        CaptionTokenizer.load(tmp_path)


def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(UserError, match=r"the hub does not answer \(.*refused\) and there is no copy .* or `train`"):
        CaptionTokenizer.load("no-such/tokenizer")
    assert "Retrying" not in "".join(capfd.readouterr())
