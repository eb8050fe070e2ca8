"""A Tokenizer from a GGUF file's metadata: byte-level BPE, with the chat template.

A file holds tokens, their kinds and merges, but of how text is cut before merging only a name; what
each name stands for is said here, as the models' own tokenizer.json says it. No torch. What it does
not do: read SentencePiece vocabularies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from workbench.errors import ModelError
from workbench.models.gguf_file import GGUFFile, Texts
from workbench.tokenizer import Tokenizer

_UNDER = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4  # kinds of token that are found in text as a whole
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Cutting:
    """How text is cut into the pieces that merges stay within, and what else goes with a name.

    pattern: of pieces; None: GPT-2's. digits: each one alone. begins: bos before every text unless
    the file says otherwise. whole: a piece that is a token needs no merges.
    """

    pattern: str | None = None
    digits: bool = False
    composed: bool = False  # text is brought to Unicode's NFC first
    begins: bool = False
    whole: bool = False


_GPT2 = Cutting()
_SMOLLM = Cutting(digits=True)
_QWEN2 = Cutting(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", composed=True)
_LLAMA3 = Cutting(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", begins=True, whole=True)
CUTTINGS = {"gpt-2": _GPT2, "smollm": _SMOLLM, "qwen2": _QWEN2, "llama-bpe": _LLAMA3}


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """The file's tokenizer. ModelError where it has none, a damaged one, or one of another kind."""
    about = _Metadata(file)
    cutting = about.cutting()
    about.tokens = about.texts("tokens")
    backend = Backend(_merging(about, cutting))
    _cut(backend, cutting)
    backend.add_tokens(_found_whole(about))
    if about.flag("add_bos_token", cutting.begins):
        backend.post_processor = _beginning(about)
    return Tokenizer(backend, _config(about), about.eos_ids())


def _merging(about: _Metadata, cutting: Cutting) -> BPE:
    """Tokens, and the pairs of them that are merged, the first pair first."""
    merges: list[Any] = [tuple(merge.split(" ")) for merge in about.texts("merges")]
    vocabulary = about.vocabulary()
    try:
        return BPE(vocab=vocabulary, merges=merges, ignore_merges=cutting.whole)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{about.where}: its tokens and merges do not fit: {error}") from error


def _found_whole(about: _Metadata) -> list[AddedToken]:
    """The tokens that are found in text as a whole; all others stand for bytes."""
    kinds = about.kinds()
    whole = [kind in (_CONTROL, _USER_DEFINED) for kind in kinds]
    about.refuse_other_letters([t for t, found in zip(about.tokens, whole) if not found])
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind, found in zip(about.tokens, kinds, whole)
        if found
    ]


def _beginning(about: _Metadata) -> processors.TemplateProcessing:
    """Puts the file's bos before a text."""
    about.required("bos_token_id")
    number = about.id("bos_token_id")
    assert number is not None
    token = about.tokens[number]
    try:
        return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{about.where}: {token!r} can begin no text: {error}") from error


class _Metadata:
    """What a file says under `tokenizer.ggml.`; ModelError for a value of the wrong kind."""

    def __init__(self, file: GGUFFile) -> None:
        self.said, self.where = file.settings, file.path
        self.tokens: Sequence[str] = ()

    def required(self, key: str) -> Any:
        """A value that no tokenizer is without."""
        if not self.said.has(_UNDER + key):
            raise ModelError(
                f"{self.where} holds no tokenizer ({_UNDER}{key} is missing); take a file that was "
                "converted together with its tokenizer."
            )
        return self.said.given[_UNDER + key]

    def texts(self, key: str) -> list[str]:
        found = self.required(key)
        if not isinstance(found, Texts):
            raise self.said.refusal(_UNDER + key, found, "a list of texts")
        return list(found)

    def flag(self, key: str, default: bool) -> bool:
        return self.said.flag(_UNDER + key, default)

    def id(self, key: str) -> int | None:
        """The token id under a key: one of the tokens', or None where the file names none."""
        if not self.said.has(_UNDER + key):
            return None
        number = self.said.whole(_UNDER + key, least=0)
        if number >= len(self.tokens):
            raise ModelError(
                f"{self.where} names token id {number} ({_UNDER}{key}); allowed: 0 to "
                f"{len(self.tokens) - 1}."
            )
        return number

    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""
        found = {token: number for number, token in enumerate(self.tokens)}
        if len(found) < len(self.tokens):
            twice = next(t for number, t in enumerate(self.tokens) if found[t] != number)
            raise self._damaged(f"{_UNDER}tokens holds {twice!r} twice; allowed: each token once")
        return found

    def kinds(self) -> list[int]:
        """What each token is; all are plain where the file does not say."""
        if not self.said.has(_UNDER + "token_type"):
            return [1] * len(self.tokens)
        found = self.required("token_type")
        if not isinstance(found, list) or not {*map(type, found)} <= {int}:
            raise self.said.refusal(_UNDER + "token_type", found, "a list of whole numbers")
        if len(found) != len(self.tokens):
            raise self._damaged(
                f"{_UNDER}token_type has {len(found)} values for {len(self.tokens)} tokens; "
                "allowed: one for each"
            )
        return found

    def refuse_other_letters(self, tokens: Sequence[str]) -> None:
        """ModelError for tokens with a letter that stands for no byte."""
        letters = set("".join(tokens)).difference(pre_tokenizers.ByteLevel.alphabet())
        strange = {letter for letter in letters if ord(letter) > 255}  # below: a byte's own number
        if strange:
            token = next(t for t in tokens if not strange.isdisjoint(t))
            raise self._damaged(
                f"{_UNDER}tokens holds {token!r}, a plain token with letters that stand for no byte"
            )

    def cutting(self) -> Cutting:
        self.required("model")
        kind, name = self.said.text(_UNDER + "model"), self.said.text(_UNDER + "pre", "gpt-2")
        if kind != "gpt2":
            name = ", SentencePiece" if kind == "llama" else ""
            raise ModelError(
                f"{self.where} has a tokenizer of kind {kind!r}{name}; supported: 'gpt2' "
                "(byte-level BPE). Take the model's folder with tokenizer.json and *.safetensors."
            )
        if name not in CUTTINGS:
            raise ModelError(
                f"{self.where} cuts text as {name!r} does; supported: "
                f"{', '.join(map(repr, CUTTINGS))}."
            )
        return CUTTINGS[name]

    def eos_ids(self) -> list[int]:
        """What may end a text or a turn."""
        found = (self.id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
        return [number for number in found if number is not None]

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.where}: {what}. Fetch the model again.")


def _cut(backend: Backend, cutting: Cutting) -> None:
    """Normaliser, cutting and decoder of a byte-level BPE."""
    if cutting.composed:
        backend.normalizer = normalizers.NFC()
    pieces: list[Any] = []
    if cutting.digits:
        pieces.append(pre_tokenizers.Digits(individual_digits=True))
    if cutting.pattern is not None:
        pieces.append(pre_tokenizers.Split(Regex(cutting.pattern), behavior="isolated"))
    own = cutting.pattern is None
    pieces.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
    backend.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    backend.decoder = decoders.ByteLevel()


def _config(about: _Metadata) -> dict[str, Any]:
    """What tokenizer_config.json would say: special tokens by name, and the chat template."""
    keys = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {f"{name}_token": about.id(f"{key}_token_id") for name, key in keys.items()}
    config: dict[str, Any] = {name: about.tokens[k] for name, k in ids.items() if k is not None}
    if about.said.has("tokenizer.chat_template"):
        config["chat_template"] = about.said.text("tokenizer.chat_template")
    return config
