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
from workbench.models.gguf_file import GGUFFile
from workbench.tokenizer import Tokenizer

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
    """The file's tokenizer. ModelError where it has none, or one of another kind."""
    about = _Metadata(file)
    cutting = about.cutting()
    tokens = about.tokens = list(about.required("tokens"))
    backend = Backend(_merging(about, cutting))
    _cut(backend, cutting)
    kinds = about.get("token_type") or [1] * len(tokens)
    whole = [(t, kind) for t, kind in zip(tokens, kinds) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens(
        [AddedToken(token, special=kind == _CONTROL, normalized=False) for token, kind in whole]
    )
    if about.get("add_bos_token", cutting.begins):
        bos = about.required("bos_token_id")
        backend.post_processor = processors.TemplateProcessing(
            single=f"{about.token(bos)} $A", special_tokens=[(about.token(bos), bos)]
        )
    return Tokenizer(backend, _config(about), about.eos_ids())


def _merging(about: _Metadata, cutting: Cutting) -> BPE:
    """Tokens, and the pairs of them that are merged, the first pair first."""
    merges = [tuple(merge.split(" ")) for merge in about.required("merges")]
    vocabulary = {token: number for number, token in enumerate(about.tokens)}
    try:
        return BPE(vocab=vocabulary, merges=merges, ignore_merges=cutting.whole)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{about.path}: its tokens and merges do not fit: {error}") from error


class _Metadata:
    """What a file says under `tokenizer.ggml.`."""

    def __init__(self, file: GGUFFile) -> None:
        self.path, self.all = file.path, file.metadata
        self.tokens: Sequence[str] = ()

    def get(self, key: str, default: Any = None) -> Any:
        return self.all.get(f"tokenizer.ggml.{key}", default)

    def required(self, key: str) -> Any:
        found = self.get(key)
        if found is None:
            raise ModelError(
                f"{self.path} holds no tokenizer (tokenizer.ggml.{key} is missing); take a file "
                "that was converted together with its tokenizer."
            )
        return found

    def token(self, number: int) -> str:
        """The token of an id that the file names."""
        if not 0 <= number < len(self.tokens):
            raise ModelError(
                f"{self.path} names token id {number}; allowed: 0 to {len(self.tokens) - 1}."
            )
        return self.tokens[number]

    def cutting(self) -> Cutting:
        kind, name = self.required("model"), self.get("pre", "gpt-2")
        if kind != "gpt2":
            name = ", SentencePiece" if kind == "llama" else ""
            raise ModelError(
                f"{self.path} has a tokenizer of kind {kind!r}{name}; supported: 'gpt2' "
                "(byte-level BPE). Take the model's folder with tokenizer.json and *.safetensors."
            )
        if name not in CUTTINGS:
            raise ModelError(
                f"{self.path} cuts text as {name!r} does; supported: "
                f"{', '.join(map(repr, CUTTINGS))}."
            )
        return CUTTINGS[name]

    def eos_ids(self) -> list[int]:
        """What may end a text or a turn."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        return [self.get(key) for key in keys if self.get(key) is not None]


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
    ids = {f"{name}_token": about.get(f"{key}_token_id") for name, key in keys.items()}
    config: dict[str, Any] = {name: about.token(k) for name, k in ids.items() if k is not None}
    template = about.all.get("tokenizer.chat_template")
    return config if template is None else config | {"chat_template": template}
