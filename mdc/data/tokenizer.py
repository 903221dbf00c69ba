"""Captions to token ids and back, so that no caption can ever spell a special token."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from ssl import SSLError
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mdc.config import Vocabulary
from mdc.errors import UserError
from mdc.files import whole_file

FILE = "tokenizer.json"
HUB_ANSWERS_S = 10.0
MASK = "[MASK]"  # how people write a gap in a template, whatever the tokenizer calls it
SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "bos": "[BOS]", "eos": "[EOS]", "mask": MASK}
# names by which a loaded tokenizer may already know a role
KNOWN = {
    "pad": ("[PAD]", "<pad>", "<|padding|>", "<|pad|>"),
    "unk": ("[UNK]", "<unk>"),
    "bos": ("[BOS]", "<s>", "<|startoftext|>", "<bos>", "[CLS]"),
    "eos": ("[EOS]", "</s>", "<|endoftext|>", "<eos>", "[SEP]"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}
PREFIX = "##"  # of word pieces that continue a word


class CaptionTokenizer:
    """A Hugging Face tokenizer with five special tokens that have ids of their own.

    The ids live in the file's post-processor, so that one `tokenizer.json` holds everything and is still readable by
    `tokenizers` and `transformers`. Captions end with the end token; the begin token is for autoregressive decoders.
    """

    def __init__(self, tokenizer: Tokenizer, roles: dict[str, str]) -> None:
        """roles: the token of each of pad, unk, bos, eos and mask, all present in the tokenizer."""
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="bos $A eos",
            special_tokens=[
                {"id": role, "ids": [_id(tokenizer, token)], "tokens": [token]} for role, token in roles.items()
            ],
        )
        tokenizer.encode_special_tokens = True  # "[MASK]" in a caption is ordinary text
        self._tokenizer = tokenizer
        self._roles = roles
        ids = {f"{role}_id": _id(tokenizer, token) for role, token in roles.items()}
        self.vocabulary = Vocabulary(size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1, **ids)
        # never to be spelt by a caption; "unknown" may be
        self._forbidden = {i for name, i in ids.items() if name != "unk_id"} | _special_ids(tokenizer)
        self._forbidden -= {self.vocabulary.unk_id}
        self._special_names = {MASK, *(token for i in self._forbidden if (token := tokenizer.id_to_token(i)))}

    @classmethod
    def train(cls, captions: Iterable[str], vocab_size: int, lowercase: bool) -> "CaptionTokenizer":
        """A WordPiece tokenizer of `captions`, which are gone through twice; the same captions give the same bytes.

        vocab_size: largest number of tokens, the special ones included.
        """
        tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL["unk"]))
        steps = [normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])]
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        counts: Counter[str] = Counter()
        for caption in captions:
            counts.update(tokenizer.normalizer.normalize_str(caption))
        letters = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
        letters = sorted(letters[: max(1, vocab_size // 4)])  # each letter costs two tokens: alone and continued
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            # The trainer numbers continued letters in the random order of a hash map, and breaks ties by number.
            # Naming them as special tokens fixes the order.
            special_tokens=[*SPECIAL.values(), *(PREFIX + letter for letter in letters)],
            initial_alphabet=letters,
            limit_alphabet=len(letters),
            continuing_subword_prefix=PREFIX,
            show_progress=False,
        )
        tokenizer.train_from_iterator(captions, trainer)
        trained = Tokenizer(models.WordPiece(tokenizer.get_vocab(), unk_token=SPECIAL["unk"]))
        trained.normalizer = tokenizer.normalizer
        trained.pre_tokenizer = tokenizer.pre_tokenizer
        trained.decoder = decoders.WordPiece(prefix=PREFIX)
        trained.add_special_tokens(list(SPECIAL.values()))
        return cls(trained, dict(SPECIAL))

    @classmethod
    def load(cls, name_or_path: str | Path) -> "CaptionTokenizer":
        """Open a `tokenizer.json`, a folder with one, or a tokenizer of the Hugging Face hub by name.

        Special tokens that it lacks are added with new ids. Raises UserError if there is no such tokenizer.
        """
        path = Path(name_or_path)
        file = path / FILE if path.is_dir() else path
        if file.is_file() and not (file.parent / "tokenizer_config.json").is_file():
            try:
                tokenizer = Tokenizer.from_file(str(file))
            except Exception as error:  # the Rust library raises bare Exception
                raise UserError(f"{file} is not a tokenizer of the Hugging Face library: {error}") from None
            saved = _saved_roles(tokenizer)
            return cls(tokenizer, saved or _complete_roles(tokenizer, {}))
        return cls(*_from_transformers(str(file.parent if file.is_file() else name_or_path)))

    def save(self, path: Path) -> None:
        """Write one JSON file; equal tokenizers give equal bytes."""
        with whole_file(path) as temporary:
            temporary.write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")

    def encode(self, captions: Sequence[str]) -> list[list[int]]:
        """Token ids per caption, the end token last; no other special id but "unknown" can occur."""
        encoded = self._tokenizer.encode_batch_fast(list(captions), add_special_tokens=False)
        rows = [encoding.ids for encoding in encoded]
        end = self.vocabulary.eos_id
        for index, ids in enumerate(rows):
            if not self._forbidden.isdisjoint(ids):
                rows[index] = ids = self._encode_escaped(captions[index])
                assert self._forbidden.isdisjoint(ids), f"special token in the ids of {captions[index]!r}"
            ids.append(end)
        return rows

    def spells_special(self, caption: str) -> bool:
        """Whether the text holds the name of a special token, which `encode` reads as ordinary text."""
        return any(name in caption for name in self._special_names)

    def count_special(self, captions: pa.StringArray) -> int:
        """How many of the texts hold the name of a special token."""
        names = "|".join(re.sub(r"([^\w\s])", r"\\\1", name) for name in sorted(self._special_names))
        return int(pc.sum(pc.match_substring_regex(captions, names)).as_py() or 0)

    def encode_template(self, template: str) -> list[int]:
        """Ids of a text in which each `[MASK]` is a gap of one token; ends with the end token.

        This is the only way to a mask id, and it is for the writer of the template, never for captions of a corpus.
        """
        ids: list[int] = []
        for index, part in enumerate(template.split(MASK)):
            if index:
                ids.append(self.vocabulary.mask_id)
            if part.strip():
                ids.extend(self.encode([part.strip()])[0][:-1])
        return [*ids, self.vocabulary.eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special ones left out."""
        hidden = self._forbidden | {self.vocabulary.unk_id}
        return str(self._tokenizer.decode([int(i) for i in ids if int(i) not in hidden], skip_special_tokens=False))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The token of each id as the vocabulary spells it."""
        return [self._tokenizer.id_to_token(int(i)) or self._roles["unk"] for i in ids]

    def _encode_escaped(self, caption: str) -> list[int]:
        """For vocabularies that hold the special names as ordinary pieces: spell the names letter by letter."""
        for name in sorted(self._special_names, key=len, reverse=True):
            caption = caption.replace(name, " ".join(name))
        return list(self._tokenizer.encode(caption, add_special_tokens=False).ids)


def _id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None, f"{token!r} is not in the vocabulary"
    return number


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    return {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def _saved_roles(tokenizer: Tokenizer) -> dict[str, str] | None:
    """The roles that `save` left in the post-processor, or None for a tokenizer of another origin."""
    processor: dict[str, Any] = json.loads(tokenizer.to_str())["post_processor"] or {}
    named = processor.get("special_tokens", {})
    if not isinstance(named, dict) or not SPECIAL.keys() <= named.keys():
        return None
    return {role: named[role]["tokens"][0] for role in SPECIAL}


def _complete_roles(tokenizer: Tokenizer, roles: dict[str, str]) -> dict[str, str]:
    """Give every role a token with an id that no other role has, adding tokens where needed."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    complete: dict[str, str] = {}
    for role in ("eos", "mask", "bos", "pad", "unk"):  # where two share a token, the earlier one keeps it
        candidates = [roles[role]] if role in roles else []
        candidates += KNOWN[role]
        free = [token for token in candidates if token in vocabulary and token not in complete.values()]
        if free:
            complete[role] = free[0]
            continue
        added = SPECIAL[role]
        while added in vocabulary:
            added = f"[{added}]"
        complete[role] = added
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in complete.values()])
    return {role: complete[role] for role in SPECIAL}


def _unreachable() -> str:
    """Why the hub does not answer, "" if it does: asked once, where the library itself would try for a minute."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_ANSWERS_S).close()
    except HTTPError:  # an answer
        return ""
    except OSError as error:  # certificates are left to the library, which has its own
        reason = getattr(error, "reason", error)
        return "" if isinstance(reason, SSLError) else str(reason)
    return ""


def _from_transformers(name: str) -> tuple[Tokenizer, dict[str, str]]:
    from transformers import AutoTokenizer

    here = Path(name).is_dir()
    silent = "" if here else _unreachable()
    try:
        loaded = AutoTokenizer.from_pretrained(name, local_files_only=here or bool(silent))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if silent:
            reason = f"the hub does not answer ({silent}) and there is no copy on this machine"
        raise UserError(
            f"caption.tokenizer: cannot load {name!r} as a folder with {FILE} or a name on the Hugging Face hub: "
            f"{reason}; give one of these, or `train`"
        ) from None
    if not loaded.is_fast:
        raise UserError(
            f"caption.tokenizer: {name!r} has no fast tokenizer, so there is no {FILE} to keep; choose another"
        )
    tokenizer = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    known = {
        "pad": loaded.pad_token,
        "unk": loaded.unk_token,
        "bos": loaded.bos_token or loaded.cls_token,
        "eos": loaded.eos_token or loaded.sep_token,
        "mask": loaded.mask_token,
    }
    return tokenizer, _complete_roles(tokenizer, {role: str(token) for role, token in known.items() if token})
