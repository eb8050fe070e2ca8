"""A GGUF file: metadata and mapped tensors, and the config and tokenizer that they amount to.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little
endian. A reader of our own because the `gguf` package takes seconds to open a file, this one some
hundredths. Config and tensor names are Hugging Face's, so that ModelSpec.from_config stays the one
place that decides what is supported. No torch.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from workbench.errors import ModelError
from workbench.models.spec import Settings
from workbench.tokenizer import Tokenizer

# Number in the file -> name, weights in a block, bytes of a block.
KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
}
PLAIN = ("F32", "F16", "BF16")  # numbers, each by itself
# Bytes of 32 weights as a CPU's kernels hold them, of kinds that take more there than in a file:
# scales and offsets that float16 does not hold exactly become float32 (kernels/cpu/products.py).
_WIDENED = {"Q4_0": 20, "Q4_K": 24, "Q6_K": 40}
# Kinds that are not read, for the error to name.
_OTHERS = {6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K"}
_OTHERS |= {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"}
_OTHERS |= {22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_OTHERS |= {29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}

_NUMBERS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}  # struct's letters
_FORMS = {letter: struct.Struct("<" + letter) for letter in _NUMBERS.values()}
_LENGTH = _FORMS["Q"]
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies. shape: rows first, as torch has it; start, nbytes: in the file."""

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GGUFFile:
    """An open file. metadata: key -> value; tensors: name -> StoredTensor.

    Raises ModelError for a file that is missing, no GGUF, cut short, or holds a kind of weights
    that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read: {error}.") from error
        if self._map[:4] != b"GGUF":
            raise ModelError(f"{path} is no GGUF file: it begins with {self._map[:4]!r}.")
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise self._cut_short(f"its header ends early: {error}") from error
        self._bytes = np.frombuffer(self._map, np.uint8)

    @property
    def settings(self) -> Settings:
        """The metadata, to be read by kind; errors name the file and the key."""
        return Settings(self.metadata, str(self.path))

    def data(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes, mapped and read-only."""
        tensor = self.tensors[name]
        return self._bytes[tensor.start : tensor.start + tensor.nbytes]

    def release(self) -> None:
        """Gives back the memory of what was read; what is read again comes from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def held_bytes(self, itemsize: int) -> int:
        """Bytes of all tensors as a CPU's float32 kernels hold them, numbers in `itemsize` each."""
        total = 0
        for tensor in self.tensors.values():
            numbers, widened = math.prod(tensor.shape), _WIDENED.get(tensor.kind)
            held = tensor.nbytes if widened is None else numbers // 32 * widened
            total += numbers * itemsize if tensor.kind in PLAIN else held
        return total

    def _cut_short(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is cut short or corrupt ({what}); fetch the model again.")

    def _read_header(self) -> None:
        cursor = _Cursor(self._map, 4)
        version = cursor.number("I")
        if version not in (2, 3):
            raise ModelError(
                f"{self.path} says GGUF version {version}; supported: 2 and 3, little endian."
            )
        num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            if key in self.metadata:
                raise self._cut_short(f"{key} is there twice")
            self.metadata[key] = cursor.value(cursor.number("I"))
        listed = [cursor.tensor() for _ in range(num_tensors)]
        grain = self.metadata.get("general.alignment", 32)
        if not isinstance(grain, int) or grain < 1:
            raise self._cut_short(f"general.alignment is {grain!r}")
        first = -(-cursor.place // grain) * grain
        self.tensors: dict[str, StoredTensor] = {}
        for name, shape, code, offset in listed:
            if name in self.tensors:
                raise self._cut_short(f"{name} is there twice")
            if code not in KINDS:
                stored, kinds = _OTHERS.get(code, f"type {code}"), [k for k, _, _ in KINDS.values()]
                raise ModelError(
                    f"{self.path}: {name} is stored as {stored}; supported: {', '.join(kinds)}. "
                    "Take another quantisation of the model, such as Q8_0."
                )
            kind, columns, size = KINDS[code]
            if not shape or 0 in shape or shape[-1] % columns:
                raise self._cut_short(f"{name} of shape {list(shape)} is no whole {kind} blocks")
            start, nbytes = first + offset, math.prod(shape) // columns * size
            if start + nbytes > len(self._map):
                end = f"{start + nbytes:,} of {len(self._map):,}"
                raise self._cut_short(f"{name} ends at byte {end}")
            self.tensors[name] = StoredTensor(kind, shape, start, nbytes)


class _Cursor:
    """Reads one value after another; struct.error where the file ends before it does."""

    def __init__(self, source: mmap.mmap, place: int) -> None:
        self.source, self.place = source, place

    def number(self, letter: str) -> Any:
        form = _FORMS[letter]
        (number,) = form.unpack_from(self.source, self.place)
        self.place += form.size
        return number

    def string(self) -> str:
        length = self.number("Q")
        start = self.place
        self.place += length
        if self.place > len(self.source):
            raise struct.error(f"a text of {length} bytes at byte {start}")
        return self.source[start : self.place].decode()

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (stored columns first), kind and offset of one tensor."""
        name, dimensions = self.string(), self.number("I")
        sizes = [self.number("Q") for _ in range(dimensions)]
        return name, tuple(reversed(sizes)), self.number("I"), self.number("Q")

    def value(self, code: int) -> Any:
        """A value of the metadata, of the type that a number stands for."""
        if code == _STRING:
            return self.string()
        if code in _NUMBERS:
            return self.number(_NUMBERS[code])
        if code != _ARRAY:
            raise struct.error(f"a value of type {code} at byte {self.place}")
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            texts = Texts(self.source, self.place, count)
            self.place = texts.end
            return texts
        if kind in _NUMBERS:
            values = struct.unpack_from(f"<{count}{_NUMBERS[kind]}", self.source, self.place)
            self.place += struct.calcsize(f"<{count}{_NUMBERS[kind]}")
            return list(values)
        return [self.value(kind) for _ in range(count)]


class Texts:
    """Many texts of a file, such as its tokens: found when it is opened, decoded when iterated."""

    __slots__ = ("_count", "_source", "_start", "end")

    def __init__(self, source: mmap.mmap, start: int, count: int) -> None:
        self._source, self._start, self._count = source, start, count
        unpack, place = _LENGTH.unpack_from, start
        for _ in range(count):
            place += 8 + unpack(source, place)[0]
        self.end = place
        if place > len(source):
            raise struct.error(f"{count} texts end at byte {place}")

    def __repr__(self) -> str:
        return f"<{self._count} texts>"

    def __iter__(self) -> Iterator[str]:
        held, unpack, start = self._source[self._start : self.end], _LENGTH.unpack_from, 8
        for _ in range(self._count):
            end = start + unpack(held, start - 8)[0]
            yield held[start:end].decode(errors="replace")
            start = end + 8


ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's stretch of each rotation, folded into the config

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}  # Mistral says llama
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
# What stretches rotations without naming a scaling, and the values that change nothing.
_STRETCHES = {
    "rope.scale_linear": (0, 1),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.attn_factor": (1,),
}


def hub_name(name: str) -> str:
    """What Hugging Face calls a tensor; a name that means nothing here stays as it is."""
    found = _LAYER.fullmatch(name)
    if found and found[2] in _PARTS:
        return f"model.layers.{found[1]}.{_PARTS[found[2]]}.{found[3]}"
    return _ENDS.get(name, name)


def kv_heads(file: GGUFFile) -> int:
    """Heads of keys and values: all heads where the file does not say."""
    start = f"{file.settings.text('general.architecture')}.attention.head_count"
    return file.settings.whole(f"{start}_kv", file.settings.whole(start))


def read_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json that this model would have. ModelError names what the file lacks."""
    settings = file.settings
    kind = settings.text("general.architecture")
    if kind not in _ARCHITECTURES:
        known = ", ".join(map(repr, _ARCHITECTURES))
        raise ModelError(f"{file.path} says architecture {kind!r}; supported: {known}.")
    if file.metadata.get(f"{kind}.expert_count"):
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported.")
    if not settings.flag(f"{kind}.attention.causal", True):
        raise ModelError(f"{file.path} says {kind}.attention.causal = False; supported: True only.")
    sizes = {name: settings.whole(f"{kind}.{key}") for name, key in _SIZES.items()}
    sizes["num_key_value_heads"] = kv_heads(file)
    own = sizes["hidden_size"] // sizes["num_attention_heads"]
    head_dim = settings.whole(f"{kind}.attention.key_length", own)
    for key in ("attention.value_length", "rope.dimension_count"):  # all columns are rotated
        found = settings.whole(f"{kind}.{key}", head_dim)
        if found != head_dim:
            only = f"the head's {head_dim} only"
            raise ModelError(f"{file.path} says {kind}.{key} = {found}; supported: {only}.")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} lacks the tensor 'token_embd.weight'.")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **sizes,
        "head_dim": head_dim,
        "rms_norm_eps": settings.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": settings.number(f"{kind}.rope.freq_base", 10000.0),
    }
    key, context = f"{kind}.attention.sliding_window", sizes["max_position_embeddings"]
    window = settings.whole(key, 0, least=0)  # 0 is none
    if window and kind == "llama":  # a Llama file with a window is a Mistral
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    elif 0 < window < context:
        fine = f"none, or the whole context of {context}"
        raise ModelError(f"{file.path} says {key} = {window}; supported: {fine}.")
    return config | _rope_scaling(file, kind, config["rope_theta"], head_dim)


def _rope_scaling(file: GGUFFile, kind: str, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, where the file holds its factors; every other one is refused."""
    settings = file.settings
    named = settings.text(f"{kind}.rope.scaling.type", "none")
    if named != "none":
        raise ModelError(
            f"{file.path} says {kind}.rope.scaling.type = {named!r}; supported: 'none', or "
            f"Llama 3's ({ROPE_FACTORS})."
        )
    for key, neutral in _STRETCHES.items():
        found = file.metadata.get(f"{kind}.{key}", 1)
        if found not in neutral:
            raise settings.refusal(f"{kind}.{key}", found, "none, or 1, which stretches nothing")
    if ROPE_FACTORS not in file.tensors:
        return {}
    stored = file.tensors[ROPE_FACTORS]
    if (stored.kind, stored.shape) != ("F32", (head_dim // 2,)):
        raise ModelError(f"{file.path}: {ROPE_FACTORS} is {stored.kind} {list(stored.shape)}.")
    factors = file.data(ROPE_FACTORS).view(np.float32)
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    # By what each rotation is slowed; see models.llama.rotary_frequencies.
    turns = original / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    kept = np.clip((turns - low) / (high - low), 0, 1)
    sound = 1 <= factor < math.inf
    if not sound or not np.allclose(factors, 1 / (kept + (1 - kept) / factor), rtol=1e-5):
        raise ModelError(
            f"{file.path}: {ROPE_FACTORS} stretches rotations otherwise than Llama 3.1 to 3.3 do "
            "(low 1, high 4, original context 8192); supported: that one, or none."
        )
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low}
    scaling |= {"high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_scaling": scaling}


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut into the pieces that merges stay within, as a file's name for it means.

    A file gives no more than the name; the rules are those of the models' own tokenizer.json.
    """

    pattern: str | None = None  # of pieces; None: GPT-2's
    digits: bool = False  # each one alone
    nfc: bool = False  # text is brought to Unicode's NFC first
    bos: bool = False  # before every text, unless the file says otherwise
    ignore_merges: bool = False  # a piece that is a token needs no merges


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "qwen2": PreTokenizer(rf"{_WORDS}|\p{{N}}|{_REST}", nfc=True),
    "llama-bpe": PreTokenizer(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", bos=True, ignore_merges=True),
}
_UNDER = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4  # kinds of token that are found in text as a whole


class TokenizerReader:
    """What a file says under `tokenizer.ggml.`, checked and put together."""

    def __init__(self, file: GGUFFile) -> None:
        self.settings, self.where = file.settings, file.path
        self.tokens: Sequence[str] = ()

    def read(self) -> Tokenizer:
        """The file's byte-level BPE, with its chat template.

        ModelError where it has no tokenizer, a damaged one, or one of another kind (SentencePiece).
        """
        self._required("model")
        kind = self.settings.text(_UNDER + "model")
        if kind != "gpt2":
            more = ", SentencePiece" if kind == "llama" else ""
            raise ModelError(
                f"{self.where} has a tokenizer of kind {kind!r}{more}; supported: 'gpt2' "
                "(byte-level BPE). Take the model's folder with tokenizer.json and *.safetensors."
            )
        self._required("pre")  # converters of before May 2024 left it out, and guessing is wrong
        name = self.settings.text(_UNDER + "pre")
        if name not in PRE_TOKENIZERS:
            known = ", ".join(map(repr, PRE_TOKENIZERS))
            raise ModelError(f"{self.where} cuts text as {name!r} does; supported: {known}.")
        rules = PRE_TOKENIZERS[name]
        self.tokens = self._texts("tokens")
        merges: list[Any] = [tuple(merge.split(" ")) for merge in self._texts("merges")]
        vocabulary = {token: number for number, token in enumerate(self.tokens)}
        if len(vocabulary) < len(self.tokens):
            twice = next(t for number, t in enumerate(self.tokens) if vocabulary[t] != number)
            raise self._damaged(f"{_UNDER}tokens holds {twice!r} twice; allowed: each token once")
        try:
            model = BPE(vocab=vocabulary, merges=merges, ignore_merges=rules.ignore_merges)
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"{self.where}: its tokens and merges do not fit: {error}") from error
        backend = Backend(model)
        if rules.nfc:
            backend.normalizer = normalizers.NFC()
        pieces: list[Any] = []
        if rules.digits:
            pieces.append(pre_tokenizers.Digits(individual_digits=True))
        if rules.pattern is not None:
            pieces.append(pre_tokenizers.Split(Regex(rules.pattern), behavior="isolated"))
        own = rules.pattern is None
        pieces.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
        backend.pre_tokenizer = pre_tokenizers.Sequence(pieces)
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens(self._whole_tokens())
        if self.settings.flag(_UNDER + "add_eos_token", False):
            told = f"says {_UNDER}add_eos_token = True; supported: False only"
            raise ModelError(f"{self.where} {told}.")
        if self.settings.flag(_UNDER + "add_bos_token", rules.bos):
            self._required("bos_token_id")
            number = self._id("bos_token_id") or 0
            bos = self.tokens[number]
            try:
                backend.post_processor = processors.TemplateProcessing(
                    single=f"{bos} $A", special_tokens=[(bos, number)]
                )
            except Exception as error:  # tokenizers raises bare Exception
                raise ModelError(f"{self.where}: {bos!r} can begin no text: {error}") from error
        # what tokenizer_config.json would say: special tokens by name, and the chat template
        keys = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        ids = {f"{name}_token": self._id(f"{key}_token_id") for name, key in keys.items()}
        config: dict[str, Any] = {n: self.tokens[k] for n, k in ids.items() if k is not None}
        if self.settings.has("tokenizer.chat_template"):
            config["chat_template"] = self.settings.text("tokenizer.chat_template")
        ends = map(self._id, ("eos_token_id", "eot_token_id", "eom_token_id"))
        return Tokenizer(backend, config, [number for number in ends if number is not None])

    def _whole_tokens(self) -> list[AddedToken]:
        """The tokens that are found in text as a whole; all others must stand for bytes."""
        kinds = [1] * len(self.tokens)  # plain
        if self.settings.has(_UNDER + "token_type"):
            kinds = self._required("token_type")
            if not isinstance(kinds, list) or not {*map(type, kinds)} <= {int}:
                raise self.settings.refusal(_UNDER + "token_type", kinds, "a list of whole numbers")
            if len(kinds) != len(self.tokens):
                raise self._damaged(
                    f"{_UNDER}token_type has {len(kinds)} values for {len(self.tokens)} tokens; "
                    "allowed: one for each"
                )
        whole, plain = [], []
        for token, kind in zip(self.tokens, kinds):
            if kind in (_CONTROL, _USER_DEFINED):
                whole.append(AddedToken(token, special=kind == _CONTROL, normalized=False))
            else:
                plain.append(token)
        letters = set("".join(plain)).difference(pre_tokenizers.ByteLevel.alphabet())
        strange = {letter for letter in letters if ord(letter) > 255}  # below: a byte's own number
        if strange:
            token = next(t for t in plain if not strange.isdisjoint(t))
            raise self._damaged(
                f"{_UNDER}tokens holds {token!r}, a plain token with letters that stand for no byte"
            )
        return whole

    def _required(self, key: str) -> Any:
        """A value that no tokenizer is without."""
        if not self.settings.has(_UNDER + key):
            raise ModelError(
                f"{self.where} holds no tokenizer ({_UNDER}{key} is missing); take a file that was "
                "converted together with its tokenizer."
            )
        return self.settings.values[_UNDER + key]

    def _texts(self, key: str) -> list[str]:
        found = self._required(key)
        if not isinstance(found, Texts):
            raise self.settings.refusal(_UNDER + key, found, "a list of texts")
        return list(found)

    def _id(self, key: str) -> int | None:
        """The token id under a key: one of the tokens', or None where the file names none."""
        if not self.settings.has(_UNDER + key):
            return None
        number = self.settings.whole(_UNDER + key, least=0)
        if number >= len(self.tokens):
            raise ModelError(
                f"{self.where} names token id {number} ({_UNDER}{key}); allowed: 0 to "
                f"{len(self.tokens) - 1}."
            )
        return number

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.where}: {what}. Fetch the model again.")
